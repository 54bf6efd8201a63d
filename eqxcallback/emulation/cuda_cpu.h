// Runs CUDA kernels on a CPU, to try them: g++ builds CUDA C++ with this header in front of it.
//
// Blocks run one after another. Each CUDA thread of a block is a fiber, which runs until it waits at a barrier or in a
// warp operation, or ends. A seed shuffles the order, and lets warps get ahead of each other: without a barrier that it
// needs, a thread reads what another has not written yet, or has written again; shared memory is NaN until somebody
// writes it. Reported as errors of the launch: threads that wait for others that never come, or that meet at different
// places, and lanes that read from one that takes no part.
//
// Of mma there is one shape, of ldmatrix one, and cp.async, as functions: cuda_cpu_mma.h, cuda_cpu_copies.h.
//
// Not here: inline PTX, other shapes of mma, copies by TMA, cooperative groups, textures, several launches at a
// time on one OS thread, waits between blocks. `extern __shared__ T name[]` has become DYN_SHARED(T, name) before, or
// DYN_SHARED_OF_FILE(T, name) outside of functions.
// Memory is that of the CPU: there are no weak orders to get wrong: a missing __syncwarp is not found.
#pragma once

#include <stdio.h>

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "cuda_cpu_copies.h"
#include "cuda_cpu_launch.h"
#include "cuda_cpu_math.h"
#include "cuda_cpu_mma.h"

// -- the language. The headers of CUDA have defined these words as attributes.

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#ifndef __align__
#define __align__(bytes) __attribute__((aligned(bytes)))
#endif
// Sanitized, it has red zones around it, and is not poisoned.
#ifdef __SANITIZE_ADDRESS__
#define __shared__ static
#else
#define __shared__ static thread_local
#endif
#define DYN_SHARED(T, name) T* const name = static_cast<T*>(cuda_cpu::current->dynamic)
#define DYN_SHARED_OF_FILE(T, name) \
  static thread_local T* name;      \
  static const cuda_cpu::DynamicName cuda_cpu_##name([](void* memory) { name = static_cast<T*>(memory); })

#define threadIdx (cuda_cpu::current->fiber->index)
#define blockIdx (cuda_cpu::current->index)
#define blockDim (cuda_cpu::current->size)
#define gridDim (cuda_cpu::current->grid)
#define warpSize 32

// The line is that of the caller.
inline void __syncthreads(int line = __builtin_LINE()) { cuda_cpu::barrier(false, {"__syncthreads", line}); }
inline int __syncthreads_count(int flag, int line = __builtin_LINE()) {
  return static_cast<int>(cuda_cpu::barrier(flag != 0, {"__syncthreads_count", line}));
}
inline int __syncthreads_or(int flag, int line = __builtin_LINE()) {
  return cuda_cpu::barrier(flag != 0, {"__syncthreads_or", line}) > 0;
}
inline int __syncthreads_and(int flag, int line = __builtin_LINE()) {
  return cuda_cpu::barrier(flag == 0, {"__syncthreads_and", line}) == 0;
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) {}
[[noreturn]] inline void __trap() { cuda_cpu::fail(cuda_cpu::who() + "calls __trap"); }
#ifdef __GLIBC__
// What `assert` calls, in place of the C library's, which ends the process.
extern "C" [[noreturn]] inline void __assert_fail(const char* what, const char*, unsigned line, const char*) noexcept {
  cuda_cpu::fail(cuda_cpu::who() + "breaks the assertion " + what + " in line " + std::to_string(line));
}
#endif

inline unsigned __ballot_sync(unsigned mask, int flag, int line = __builtin_LINE()) {
  return static_cast<unsigned>(cuda_cpu::meet(mask, flag != 0, cuda_cpu::kBallot, {"__ballot_sync", line}));
}
inline int __any_sync(unsigned mask, int flag, int line = __builtin_LINE()) {
  return cuda_cpu::meet(mask, flag != 0, cuda_cpu::kBallot, {"__any_sync", line}) != 0;
}
inline int __all_sync(unsigned mask, int flag, int line = __builtin_LINE()) {
  return cuda_cpu::meet(mask, flag == 0, cuda_cpu::kBallot, {"__all_sync", line}) == 0;
}
inline void __syncwarp(unsigned mask = ~0u, int line = __builtin_LINE()) {
  cuda_cpu::meet(mask, 0, cuda_cpu::kBallot, {"__syncwarp", line});
}

// A lane whose source is outside of its segment of `width` lanes keeps its value.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, int line = __builtin_LINE()) {
  const unsigned lane = cuda_cpu::current->fiber->lane, low = static_cast<unsigned>(width) - 1;
  return cuda_cpu::shuffle(mask, value, (lane & ~low) | (static_cast<unsigned>(source) & low), {"__shfl_sync", line});
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, int line = __builtin_LINE()) {
  const unsigned lane = cuda_cpu::current->fiber->lane, source = lane ^ static_cast<unsigned>(bits);
  const unsigned segment = ~(static_cast<unsigned>(width) - 1);
  const bool beyond = (source & segment) > (lane & segment);
  return cuda_cpu::shuffle(mask, value, beyond ? lane : source, {"__shfl_xor_sync", line});
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE()) {
  const unsigned lane = cuda_cpu::current->fiber->lane, low = static_cast<unsigned>(width) - 1;
  const bool beyond = (lane & low) + delta > low;
  return cuda_cpu::shuffle(mask, value, beyond ? lane : lane + delta, {"__shfl_down_sync", line});
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE()) {
  const unsigned lane = cuda_cpu::current->fiber->lane, low = static_cast<unsigned>(width) - 1;
  return cuda_cpu::shuffle(mask, value, (lane & low) < delta ? lane : lane - delta, {"__shfl_up_sync", line});
}

// Fibers do not interrupt each other. The address says the type, as in CUDA.
namespace cuda_cpu {
template <class T>
using Same = typename std::enable_if<true, T>::type;
}
template <class T>
T atomicExch(T* address, cuda_cpu::Same<T> value) {
  return std::exchange(*address, value);
}
template <class T>
T atomicAdd(T* address, cuda_cpu::Same<T> value) {
  return std::exchange(*address, *address + value);
}
template <class T>
T atomicSub(T* address, cuda_cpu::Same<T> value) {
  return std::exchange(*address, *address - value);
}
template <class T>
T atomicMax(T* address, cuda_cpu::Same<T> value) {
  return std::exchange(*address, std::max(*address, value));
}
template <class T>
T atomicMin(T* address, cuda_cpu::Same<T> value) {
  return std::exchange(*address, std::min(*address, value));
}
template <class T>
T atomicAnd(T* address, cuda_cpu::Same<T> value) {
  return std::exchange(*address, *address & value);
}
template <class T>
T atomicOr(T* address, cuda_cpu::Same<T> value) {
  return std::exchange(*address, *address | value);
}
template <class T>
T atomicXor(T* address, cuda_cpu::Same<T> value) {
  return std::exchange(*address, *address ^ value);
}
inline unsigned atomicInc(unsigned* address, unsigned last) {
  return std::exchange(*address, *address >= last ? 0 : *address + 1);
}
inline unsigned atomicDec(unsigned* address, unsigned last) {
  return std::exchange(*address, *address == 0 || *address > last ? last : *address - 1);
}
template <class T>
T atomicCAS(T* address, cuda_cpu::Same<T> expected, cuda_cpu::Same<T> value) {
  return std::exchange(*address, *address == expected ? value : *address);
}

// Loads and stores that say how to cache.
template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class T>
T __ldca(const T* address) {
  return *address;
}
template <class T>
T __ldcg(const T* address) {
  return *address;
}
template <class T>
T __ldcs(const T* address) {
  return *address;
}
template <class T>
void __stwb(T* address, cuda_cpu::Same<T> value) {
  *address = value;
}
template <class T>
void __stcg(T* address, cuda_cpu::Same<T> value) {
  *address = value;
}
template <class T>
void __stcs(T* address, cuda_cpu::Same<T> value) {
  *address = value;
}
