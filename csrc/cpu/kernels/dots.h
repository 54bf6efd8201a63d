// Dot products of rows of f32 with rows that are widened in registers.
#pragma once

#include "cpu/kernels/common.h"

namespace eqxcallback::cpu {
namespace {

// sums[r * stride + w], whose lanes are still to be added: row r of x, rows of which are `size` apart, and rows[w].
// Where the caller's rows come from memory, `ahead` is how many elements after them those begin that come next: short
// rows, of which several are read at once, are too many streams for the processor to see that. 0: they are in cache.
//
// Never inlined: among other loops, the compiler would keep the sums in memory.
template <int kRows, int kWeights, class T>
[[gnu::noinline]] void dots(F* sums, int stride, const float* x, const T* const* rows, int64_t size, int64_t ahead) {
  constexpr int64_t kLine = 64 / sizeof(T);
  F acc[kRows][kWeights];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int w = 0; w < kWeights; ++w) acc[r][w] = Simd::zero();
  }
  for_vectors(size, [&](int64_t i, auto count) {
    if (ahead != 0 && i % kLine == 0) {
#pragma GCC unroll 8
      for (int w = 0; w < kWeights; ++w) __builtin_prefetch(rows[w] + ahead + i);
    }
    F values[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) values[r] = load(x + r * size + i, count);
#pragma GCC unroll 8
    for (int w = 0; w < kWeights; ++w) {
      const F v = load(rows[w] + i, count);
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

// put(r, o, sum) for all rows of x and of the weights, which are read once: rows of them are `size` apart.
template <class T, class Put>
void few_rows(const float* x, int64_t num_rows, const T* weights, int64_t begin, int64_t end, int64_t size,
              const Put& put) {
  constexpr int kWeights = 4, kMost = 8, kRows = kLanes < 16 ? 2 : 4;
  const auto tile = [&]<int kR, int kW>(int64_t r, int64_t o) {
    const T* rows[kW];
    for (int w = 0; w < kW; ++w) rows[w] = weights + (o + w) * size;
    F sums[kR * kW];
    dots<kR, kW>(sums, kW, x + r * size, rows, size, r == 0 ? kW * size : 0);
    for (int i = 0; i < kR; ++i) {
      for (int w = 0; w < kW; ++w) put(r + i, o + w, Simd::sum(sums[i * kW + w]));
    }
  };
  const auto columns = [&]<int kW>(int64_t o) {
    int64_t r = 0;
    for (; r + kRows <= num_rows; r += kRows) tile.template operator()<kRows, kW>(r, o);
    for (; r < num_rows; ++r) tile.template operator()<1, kW>(r, o);
  };
  int64_t o = begin;
  if (num_rows == 1) {  // one row alone has too few sums that do not wait for each other
    for (; o + kMost <= end; o += kMost) tile.template operator()<1, kMost>(0, o);
  }
  for (; o + kWeights <= end; o += kWeights) columns.template operator()<kWeights>(o);
  for (; o < end; ++o) columns.template operator()<1>(o);
}

}  // namespace
}  // namespace eqxcallback::cpu
