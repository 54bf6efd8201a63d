// Sums of outer products: in f32, or of numbers of which the processor multiplies several at a time.
#pragma once

#include "cpu/kernels/common.h"

namespace eqxcallback::cpu {
namespace {

template <class T, class Count>
F line_of(const T* p, Count count) {
  return load(p, count);
}
F factor_of(const float* p) { return Simd::broadcast(*p); }
// Two bf16 whose products go into one sum.
struct Bf16Pair {
  Bf16 first, second;
};
#ifdef EQXCALLBACK_PAIRS
auto line_of(const Bf16Pair* p, Full) { return Simd::load_pairs(&p->first); }
auto factor_of(const Bf16Pair* p) { return Simd::broadcast_pair(&p->first); }
#endif
#ifdef EQXCALLBACK_BYTES
// Four bytes: digits as a factor, weights in a line.
struct ByteFour {
  int8_t bytes[4];
};
[[maybe_unused]] Bytes::Ints line_of(const ByteFour* p, Full) { return Bytes::load(p); }  // tiles take the lines
Bytes::Ints factor_of(const ByteFour* p) {
  int32_t bits;
  std::memcpy(&bits, p, sizeof(bits));
  return Bytes::Ints{} + bits;
}
void store_fours(ByteFour* p, F x) { Bytes::store(reinterpret_cast<int32_t*>(p), reinterpret_cast<Bytes::Ints>(x)); }
#endif

// acc[m, :] += sum_j a(m, j) b[j, :] with a(m, j) = a[m * row + j * column]: kVectors vectors of rows of b that are
// `stride` elements apart. `count` says how many lanes count.
template <class Acc, int kRows, int kVectors, class A, class B, class Count = Full>
[[gnu::always_inline]] inline void add_outer(Acc (&acc)[kRows][kVectors], const A* a, int64_t row, int64_t column,
                                             const B* b, int64_t n, int64_t stride, Count count = {}) {
  for (int64_t j = 0; j < n; ++j) {
    decltype(line_of(b, count)) line[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) line[v] = line_of(b + j * stride + v * kLanes, count);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const auto factor = factor_of(a + m * row + j * column);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) acc[m][v] = Simd::fma(factor, line[v], acc[m][v]);
    }
  }
}

}  // namespace
}  // namespace eqxcallback::cpu
