// The speed at which an instruction set multiplies and adds, with which a profile compares kernels.
#pragma once

#include "cpu/kernels/common.h"

namespace eqxcallback::cpu {
namespace {

// Runs so many steps of the sums that an outer product keeps in registers, which hide each other's latency.
int64_t multiply_adds(int64_t steps) {
  constexpr int kSums = Simd::kOuterRows * Simd::kOuterVectors;
  // Read at run time, so that the compiler computes nothing.
  volatile float factor = 0.999f, term = 0.001f;
  const F a = Simd::broadcast(factor), b = Simd::broadcast(term);
  F sums[kSums];
  for (int i = 0; i < kSums; ++i) sums[i] = Simd::broadcast(static_cast<float>(i));
  for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 32
    for (int i = 0; i < kSums; ++i) sums[i] = Simd::fma(sums[i], a, b);
  }
  F total = sums[0];
  for (int i = 1; i < kSums; ++i) total = Simd::add(total, sums[i]);
  factor = Simd::sum(total);  // or the compiler would drop the sums
  return steps * kSums * Simd::kLanes * 2;
}

}  // namespace
}  // namespace eqxcallback::cpu
