// Asynchronous copies from global to shared memory, for cuda_cpu.h.
#pragma once

#include <cstring>

#include "cuda_cpu_fibers.h"

namespace cuda_cpu {

// Any moment from the copy's begin to the wait for it may be the one when it arrives. With an odd seed it is the last:
// who does not wait reads what was there before. With an even one it is the first: who copies to where others still
// read takes it from them.
inline void arrive(const Copy& copy) {
  std::memset(copy.to, 0, copy.bytes);
  std::memcpy(copy.to, copy.from, copy.read);
}

inline void arrive_all_but(unsigned groups) {
  Fiber& fiber = *current->fiber;
  const auto begin = fiber.copies.begin();
  auto end = begin;
  while (end != fiber.copies.end() && fiber.groups - end->group > groups) arrive(*end++);
  fiber.copies.erase(begin, end);
}

}  // namespace cuda_cpu

// As PTX has it for `cp.async`: `bytes`, 4, 8 or 16, of which the first `read` are read, and the others are 0.
inline void cuda_cpu_cp_async(void* to, const void* from, unsigned bytes, unsigned read, int line = __builtin_LINE()) {
  cuda_cpu::Fiber& fiber = *cuda_cpu::current->fiber;
  if ((reinterpret_cast<uintptr_t>(to) | (read ? reinterpret_cast<uintptr_t>(from) : 0)) % bytes != 0) {
    cuda_cpu::fail("cp.async in line " + std::to_string(line) + ": an address is not a multiple of " +
                   std::to_string(bytes));
  }
  const cuda_cpu::Copy copy = {to, from, bytes, read, fiber.groups};
  if (cuda_cpu::current->copies_arrive_early) {
    cuda_cpu::arrive(copy);
  } else {
    fiber.copies.push_back(copy);
  }
}
inline void cuda_cpu_cp_async_commit_group() { ++cuda_cpu::current->fiber->groups; }
inline void cuda_cpu_cp_async_wait_group(unsigned left) { cuda_cpu::arrive_all_but(left); }
