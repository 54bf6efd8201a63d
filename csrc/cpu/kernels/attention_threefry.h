// Random bits as JAX makes them from a key: Threefry 2x32 with 20 rounds
// (https://www.thesalmons.org/john/random123/papers/random123sc11.pdf), for any part of an array: element n of it is
// the cipher of n, in 64 bits, its halves joined by xor.
#pragma once

#include "cpu/kernels/common.h"

namespace eqxcallback::cpu {
namespace {

// As many lanes as there are floats, in vectors of the compiler, as only integers are needed.
using Bits = uint32_t __attribute__((vector_size(kLanes * sizeof(uint32_t))));

template <int kRotation>
void threefry_round(Bits& x, Bits& y) {
  x += y;
  y = ((y << kRotation) | (y >> (32 - kRotation))) ^ x;
}

template <int kA, int kB, int kC, int kD>
void threefry_rounds(Bits& x, Bits& y, uint32_t add_x, uint32_t add_y) {
  threefry_round<kA>(x, y);
  threefry_round<kB>(x, y);
  threefry_round<kC>(x, y);
  threefry_round<kD>(x, y);
  x += add_x;
  y += add_y;
}

Bits threefry(const uint32_t* key, Bits high, Bits low) {
  const uint32_t a = key[0], b = key[1], c = a ^ b ^ 0x1bd11bdau;
  Bits x = high + a, y = low + b;
  threefry_rounds<13, 15, 26, 6>(x, y, b, c + 1);
  threefry_rounds<17, 29, 16, 24>(x, y, c, a + 2);
  threefry_rounds<13, 15, 26, 6>(x, y, a, b + 3);
  threefry_rounds<17, 29, 16, 24>(x, y, b, c + 4);
  threefry_rounds<13, 15, 26, 6>(x, y, c, a + 5);
  return x ^ y;
}

// factors[j, i] = kept where jax.random.bernoulli(key, probability) is true at element start + i * columns + j, else 0.
template <int kWidth>
void threefry_factors(const uint32_t* key, uint64_t start, uint64_t columns, int64_t rows, float probability,
                      float kept, float* factors) {
  // A number in [0, 1) has 23 of the bits. It is below the probability if these bits are below the threshold.
  const auto threshold = static_cast<uint32_t>(__builtin_ceilf(probability * 8388608.0f));
  uint32_t high[kWidth], low[kWidth];
  for (int i = 0; i < kWidth; ++i) {
    const uint64_t element = start + static_cast<uint64_t>(i) * columns;
    high[i] = static_cast<uint32_t>(element >> 32);
    low[i] = static_cast<uint32_t>(element);
  }
  for (int64_t j = 0; j < rows; ++j) {
    for (int i = 0; i < kWidth; i += kLanes) {
      Bits x, y;
      std::memcpy(&x, high + i, sizeof(x));
      std::memcpy(&y, low + i, sizeof(y));
      const Bits before = y;
      y += static_cast<uint32_t>(j);
      x -= reinterpret_cast<Bits>(y < before);  // true is -1: the carry
      const auto is_kept = reinterpret_cast<Bits>((threefry(key, x, y) >> 9) < threshold);
      uint32_t bits;
      std::memcpy(&bits, &kept, sizeof(bits));
      const Bits result = is_kept & bits;
      std::memcpy(factors + j * kWidth + i, &result, sizeof(result));
    }
  }
}

}  // namespace
}  // namespace eqxcallback::cpu
