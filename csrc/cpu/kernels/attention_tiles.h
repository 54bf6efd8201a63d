// What the kernels of attention have in common: products of tiles with rows along the vector lanes, and rows of one
// head.
#pragma once

#include "cpu/kernels/outer.h"

namespace eqxcallback::cpu {
namespace {

inline constexpr int kKeyBlock = 128;
inline constexpr int kQueryBlock = Simd::kOuterVectors * kLanes;

// c[m, :] = sum_j a(m, j) b[j, :], or added to it: kVectors vectors of rows that are `stride` floats, or pairs, apart.
// a(m, j) = a[m * row + j * column].
template <int kRows, int kVectors, bool kAdd, class E>
void outer_tile(float* c, const E* a, int64_t row, int64_t column, const E* b, int64_t n, int64_t stride) {
  F acc[kRows][kVectors];
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      acc[m][v] = kAdd ? Simd::load(c + m * stride + v * kLanes) : Simd::zero();
    }
  }
  add_outer(acc, a, row, column, b, n, stride);
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) Simd::store(c + m * stride + v * kLanes, acc[m][v]);
  }
}

template <int kVectors, bool kAdd, class E>
void outer_columns(float* c, int64_t rows, const E* a, int64_t row, int64_t column, const E* b, int64_t n,
                   int64_t stride) {
  constexpr int kRows = Simd::kOuterRows;
  int64_t m = 0;
  for (; m + kRows <= rows; m += kRows) {
    outer_tile<kRows, kVectors, kAdd>(c + m * stride, a + m * row, row, column, b, n, stride);
  }
  for (; m + 2 <= rows; m += 2) {
    outer_tile<2, kVectors, kAdd>(c + m * stride, a + m * row, row, column, b, n, stride);
  }
  for (; m < rows; ++m) outer_tile<1, kVectors, kAdd>(c + m * stride, a + m * row, row, column, b, n, stride);
}

// With queries along the lanes, kQueryBlock of them, of which kVectors vectors count.
template <bool kAdd, int kVectors = Simd::kOuterVectors, class E>
void outer_product(float* c, int64_t rows, const E* a, int64_t row, int64_t column, const E* b, int64_t n) {
  outer_columns<kVectors, kAdd>(c, rows, a, row, column, b, n, kQueryBlock);
}

// c += a b with rows of `width` floats, a multiple of kLanes.
void add_product(float* c, int64_t rows, const float* a, int64_t row, int64_t column, const float* b, int64_t n,
                 int64_t width) {
  int64_t i = 0;
  for (; i + kQueryBlock <= width; i += kQueryBlock) {
    outer_columns<Simd::kOuterVectors, true>(c + i, rows, a, row, column, b + i, n, width);
  }
  for (; i + 2 * kLanes <= width; i += 2 * kLanes) {
    outer_columns<2, true>(c + i, rows, a, row, column, b + i, n, width);
  }
  for (; i < width; i += kLanes) outer_columns<1, true>(c + i, rows, a, row, column, b + i, n, width);
}

// Rows of one head, as f32: where they are, or widened into `buffer`.
struct Rows {
  const float* data;
  int64_t stride;
};
Rows as_floats(const float* x, int64_t stride, int64_t, int64_t, float*) { return {x, stride}; }
template <class T>
Rows as_floats(const T* x, int64_t stride, int64_t rows, int64_t size, float* buffer) {
  for (int64_t r = 0; r < rows; ++r) {
    for_vectors(size,
                [&](int64_t i, auto count) { store(buffer + r * size + i, load(x + r * stride + i, count), count); });
  }
  return {buffer, size};
}

// out[d, i] = x[i, d] * factor, of kQueryBlock rows, with zeros from row `rows` on.
template <class T>
void transpose(float* out, const T* x, int64_t stride, int64_t rows, int64_t size, float factor) {
  for (int64_t d = 0; d < size; ++d) {
    for (int64_t i = 0; i < kQueryBlock; ++i) {
      out[d * kQueryBlock + i] = i < rows ? to_float(x[i * stride + d]) * factor : 0.0f;
    }
  }
}

// Queries, or their cotangents, as `row_products` wants them: times `factor` in f32, or where the processor multiplies
// T in pairs, pairs of neighbouring d as they are.
template <class T>
bool in_pairs(int64_t size) {
  return kHasPairs<T> && size % 2 == 0;
}
template <class T>
void arrange_queries(float* out, const T* x, int64_t stride, int64_t rows, int64_t size, float factor) {
  if (!in_pairs<T>(size)) return transpose(out, x, stride, rows, size, factor);
  for (int64_t d = 0; d < size / 2; ++d) {
    std::memset(out + d * kQueryBlock, 0, kQueryBlock * sizeof(float));
    for (int64_t i = 0; i < rows; ++i) std::memcpy(out + d * kQueryBlock + i, x + i * stride + 2 * d, 2 * sizeof(T));
  }
}

// out[m, :] = factor * sum_d x[m, d] q[d, :] of queries that `arrange_queries` has arranged with that factor.
template <int kVectors, class T>
void row_products(float* out, const T* x, int64_t stride, int64_t rows, int64_t size, const float* queries,
                  float factor, float* widened) {
  if constexpr (kHasPairs<T>) {
    if (in_pairs<T>(size)) {
      outer_product<false, kVectors>(out, rows, reinterpret_cast<const Bf16Pair*>(x), stride / 2, 1,
                                     reinterpret_cast<const Bf16Pair*>(queries), size / 2);
      if (factor == 1) return;
      for (int64_t i = 0; i < rows * kQueryBlock; i += kLanes) {
        Simd::store(out + i, Simd::mul(Simd::load(out + i), Simd::broadcast(factor)));
      }
      return;
    }
  }
  const Rows floats = as_floats(x, stride, rows, size, widened);
  outer_product<false, kVectors>(out, rows, floats.data, floats.stride, 1, queries, size);
}

}  // namespace
}  // namespace eqxcallback::cpu
