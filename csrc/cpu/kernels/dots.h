// Dot products of rows: of f32 with rows that are widened in registers, or of bf16 if the processor multiplies bf16.
#pragma once

#include "cpu/kernels/common.h"

namespace eqxcallback::cpu {
namespace {

// The vectors of both rows, which `Simd::fma` multiplies.
template <class X, class W>
struct Terms {
  static constexpr int kStep = kLanes;
  template <class T, class Count>
  static F load(const T* p, Count count) {
    return cpu::load(p, count);
  }
};
#ifdef EQXCALLBACK_PAIRS
template <>
struct Terms<Bf16, Bf16> {
  static constexpr int kStep = 2 * kLanes;
  static auto load(const Bf16* p, Full) { return Simd::load_pairs(p); }
  static auto load(const Bf16* p, int n) { return Simd::load_pairs(p, n); }
};
#endif

// The type that rows of W are multiplied with: f32, unless the processor multiplies W without widening.
template <class W>
using Factor = std::conditional_t<kHasPairs<W>, W, float>;

// Returns `n` elements of x in their own memory, or widened into `buffer`.
template <class W, class T>
const Factor<W>* as_factors(const T* x, int64_t n, float* buffer) {
  if constexpr (std::is_same_v<Factor<W>, T>) {
    return x;
  } else {
    for_vectors(n, [&](int64_t i, auto count) { store(buffer + i, load(x + i, count), count); });
    return buffer;
  }
}

// Where `dots` prefetches: from so many bytes after the first row on, `step` for each vector of it, and the same
// `between` bytes further for each of the other rows.
struct Ahead {
  int64_t begin, step, between;
};

// Calls done(acc) with the sums acc[r][w], whose lanes are still to be added, of products of row r of x, whose rows are
// `x_stride` apart, and rows[w]. They may continue the sums before[r * kWeights + w] of an earlier part of the rows.
template <int kRows, int kWeights, int kLocality, bool kContinues, class X, class T, class Done>
[[gnu::always_inline]] inline void with_dots(const F* before, const X* x, int64_t x_stride, const T* const* rows,
                                             int64_t size, const Ahead& ahead, const Done& done) {
  using Each = Terms<X, T>;
  F acc[kRows][kWeights];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int w = 0; w < kWeights; ++w) acc[r][w] = kContinues ? before[r * kWeights + w] : Simd::zero();
  }
  const char* next = reinterpret_cast<const char*>(rows[0]) + ahead.begin;
  for_vectors<Each::kStep>(size, [&](int64_t i, auto count) __attribute__((always_inline)) {
    decltype(Each::load(x, count)) values[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) values[r] = Each::load(x + r * x_stride + i, count);
#pragma GCC unroll 8
    for (int w = 0; w < kWeights; ++w) {
      const auto v = Each::load(rows[w] + i, count);
      if constexpr (kLocality != 0) prefetch<kLocality>(next + w * ahead.between, 1);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) acc[r][w] = Simd::fma(values[r], v, acc[r][w]);
    }
    next += ahead.step;
  });
  done(acc);
}

// Puts these sums into sums[r * stride + w].
//
// Never inlined, as the next function: among other loops, the compiler would keep the sums in memory.
template <int kRows, int kWeights, int kLocality = 0, bool kContinues = false, class X, class T>
[[gnu::noinline]] void dots(F* sums, int stride, const X* x, int64_t x_stride, const T* const* rows, int64_t size,
                            const Ahead& ahead = {}) {
  with_dots<kRows, kWeights, kLocality, kContinues>(sums, x, x_stride, rows, size, ahead,
                                                    [&](const auto& acc) __attribute__((always_inline)) {
#pragma GCC unroll 8
                                                      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
                                                        for (int w = 0; w < kWeights; ++w)
                                                          sums[r * stride + w] = acc[r][w];
                                                      }
                                                    });
}

// Puts the sums of their lanes into totals[r * kWeights + w].
template <int kRows, int kWeights, int kLocality, bool kContinues = false, class X, class T>
[[gnu::noinline]] void total_dots(float* totals, const F* before, const X* x, int64_t x_stride, const T* const* rows,
                                  int64_t size, const Ahead& ahead) {
  with_dots<kRows, kWeights, kLocality, kContinues>(
      before, x, x_stride, rows, size, ahead, [&](const auto& acc) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          if constexpr (kWeights == 4) {
            Simd::four_sums(totals + 4 * r, acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
          } else {
            float same[4];  // in the same order: no sum depends on which rows are in a tile with it
            Simd::four_sums(same, acc[r][0], acc[r][0], acc[r][0], acc[r][0]);
            totals[r] = same[0];
          }
        }
      });
}

// Calls body(Int<n>{}), for n from 1 to kMost.
template <int kMost, class Body>
void with_count(int64_t n, const Body& body) {
  if constexpr (kMost > 1) {
    if (n < kMost) return with_count<kMost - 1>(n, body);
  }
  body(Int<kMost>{});
}

}  // namespace
}  // namespace eqxcallback::cpu
