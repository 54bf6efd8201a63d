// Runs CUDA kernels on a CPU, for tests: g++ builds a .cu file with this header in front of it.
//
// Blocks run one after another. Each CUDA thread of a block is a fiber, which runs until it waits at a barrier or in a
// warp operation, or ends. A seed shuffles the order, and lets warps get ahead of each other: without a barrier that it
// needs, a thread reads what another has not written yet, or has written again; shared memory is NaN until somebody
// writes it. Reported as errors of the launch: threads that wait for others that never come, or that meet at different
// places, and lanes that read from one that takes no part.
//
// Not here: inline PTX, mma, asynchronous copies, cooperative groups, several launches at a time on one OS thread,
// waits between blocks. `extern __shared__` is DYN_SHARED. Memory is that of the CPU: there are no weak orders to get
// wrong: a missing __syncwarp is not found.
#pragma once

#include "cuda_cpu_launch.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

// -- the language. The headers of CUDA have defined these words as attributes.

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __forceinline__
#undef __launch_bounds__
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
// Sanitized, it has red zones around it, and is not poisoned.
#ifdef __SANITIZE_ADDRESS__
#define __shared__ static
#else
#define __shared__ static thread_local
#endif
#define DYN_SHARED(T, name) T* const name = static_cast<T*>(cuda_cpu::current->dynamic)

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

// Fibers do not interrupt each other.
template <class T>
T atomicExch(T* address, T value) {
  return std::exchange(*address, value);
}
template <class T>
T atomicAdd(T* address, T value) {
  return std::exchange(*address, *address + value);
}
template <class T>
T atomicMax(T* address, T value) {
  return std::exchange(*address, std::max(*address, value));
}
template <class T>
T atomicMin(T* address, T value) {
  return std::exchange(*address, std::min(*address, value));
}
template <class T>
T atomicCAS(T* address, T expected, T value) {
  return std::exchange(*address, *address == expected ? value : *address);
}

template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class T>
void __stwb(T* address, T value) {
  *address = value;
}
using std::max;
using std::min;
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float x, float y) { return x / y; }

inline float __int_as_float(int bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline float __uint_as_float(unsigned bits) { return __int_as_float(static_cast<int>(bits)); }
inline int __float_as_int(float value) {
  int bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
inline unsigned __float_as_uint(float value) { return static_cast<unsigned>(__float_as_int(value)); }
// Four of the eight bytes of (high, low), each chosen by three bits of a half byte of `selector`.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  unsigned result = 0;
  for (unsigned i = 0; i < 4; ++i) {
    result |= static_cast<unsigned>(bytes >> (8 * (selector >> (4 * i) & 7)) & 255) << (8 * i);
  }
  return result;
}
