// The end of a product of digits and weights: sums of integers become numbers.
#pragma once

#include "cpu/kernels/linear_digits.h"

namespace eqxcallback::cpu {
namespace {

// True if the sums with the lowest digits stay apart. 32 integers of 23 bits times 15 at most have room in 32 bits;
// times larger weights they have not.
template <Encoding encoding, int kDigits>
inline constexpr bool kHasUpper = kDigits == 3 && encoding != Encoding::kQ4_1 && encoding != Encoding::kQ4_1_R16;

// Returns the products of a block of x, whose digits have these sums with the weights of several rows, and stand for so
// much.
template <Encoding encoding, int kDigits>
[[gnu::always_inline]] inline F dot_of_digits(const Ints (&sums)[kDigits], float lower_scale, float upper_scale) {
  Ints lower = sums[0], upper{};
  if constexpr (kDigits == 3) upper = sums[1] + 256 * sums[2];
  if constexpr (kDigits == 3 && !kHasUpper<encoding, kDigits>) lower += 256 * upper;
  const F dot = Simd::mul(__builtin_convertvector(lower, F), Simd::broadcast(lower_scale));
  if constexpr (!kHasUpper<encoding, kDigits>) return dot;
  return Simd::fma(__builtin_convertvector(upper, F), Simd::broadcast(upper_scale), dot);
}

}  // namespace
}  // namespace eqxcallback::cpu
