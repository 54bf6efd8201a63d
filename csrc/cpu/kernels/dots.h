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

// Computes sums[r * stride + w], whose lanes are still to be added, of row r of x, whose rows are `x_stride` apart, and
// rows[w].
//
// Never inlined: among other loops, the compiler would keep the sums in memory.
template <int kRows, int kWeights, class X, class T>
[[gnu::noinline]] void dots(F* sums, int stride, const X* x, int64_t x_stride, const T* const* rows, int64_t size) {
  using Each = Terms<X, T>;
  F acc[kRows][kWeights];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int w = 0; w < kWeights; ++w) acc[r][w] = Simd::zero();
  }
  for_vectors<Each::kStep>(size, [&](int64_t i, auto count) {
    decltype(Each::load(x, count)) values[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) values[r] = Each::load(x + r * x_stride + i, count);
#pragma GCC unroll 8
    for (int w = 0; w < kWeights; ++w) {
      const auto v = Each::load(rows[w] + i, count);
      if constexpr (kRows == 1) prefetch_stream(rows[w] + i);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) acc[r][w] = Simd::fma(values[r], v, acc[r][w]);
    }
  });
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int w = 0; w < kWeights; ++w) sums[r * stride + w] = acc[r][w];
  }
}

// Calls tile(rows, weights, r, o, part), whose first two arguments are `Int`s, for all of `num_rows` rows of x and for
// the rows of weights from `begin` to `end`. A tile has the rows o, o + part, and so on; the next tile has the rows
// after them. These are long streams, which the processor sees coming; neighbouring rows would be many short ones.
template <int kRows, int kWeights, class Tile>
void for_tiles(int64_t num_rows, int64_t begin, int64_t end, const Tile& tile) {
  const auto columns = [&](auto rows, auto weights, int64_t first, int64_t part) {
    constexpr int kAtOnce = decltype(rows)::value;
    for (int64_t o = first; o < first + part; ++o) {
      int64_t r = 0;
      for (; r + kAtOnce <= num_rows; r += kAtOnce) tile(rows, weights, r, o, part);
      for (; r < num_rows; ++r) tile(Int<1>{}, weights, r, o, part);
    }
  };
  // A single row has too few sums that do not wait for each other.
  const int64_t parts = num_rows == 1 ? 2 * kWeights : kWeights, part = (end - begin) / parts;
  if (num_rows == 1) {
    columns(Int<1>{}, Int<2 * kWeights>{}, begin, part);
  } else {
    columns(Int<kRows>{}, Int<kWeights>{}, begin, part);
  }
  columns(Int<kRows>{}, Int<1>{}, begin + parts * part, end - begin - parts * part);
}

// Calls put(r, o, sum) for the rows of x and of weights, which are `size` apart and read once.
template <class X, class T, class Put>
void few_rows(const X* x, int64_t num_rows, int64_t x_stride, const T* weights, int64_t begin, int64_t end,
              int64_t size, const Put& put) {
  constexpr int kTileRows = kManyRegisters ? 4 : 2;
  const auto tile = [&](auto num_x, auto num_w, int64_t r, int64_t o, int64_t part) {
    constexpr int kRows = decltype(num_x)::value, kWeights = decltype(num_w)::value;
    const T* rows[kWeights];
    for (int w = 0; w < kWeights; ++w) rows[w] = weights + (o + w * part) * size;
    F sums[kRows * kWeights];
    dots<kRows, kWeights>(sums, kWeights, x + r * x_stride, x_stride, rows, size);
    for (int i = 0; i < kRows; ++i) {
      for (int w = 0; w < kWeights; ++w) put(r + i, o + w * part, Simd::sum(sums[i * kWeights + w]));
    }
  };
  for_tiles<kTileRows, 4>(num_rows, begin, end, tile);
}

}  // namespace
}  // namespace eqxcallback::cpu
