// What the kernels of attention have in common: products of tiles with rows along the vector lanes, and rows of one
// head.
#pragma once

#include "cpu/kernels/common.h"

namespace eqxcallback::cpu {
namespace {

inline constexpr int kKeyBlock = 128;
inline constexpr int kQueryBlock = Simd::kOuterVectors * kLanes;

// c[m, :] = sum_j a(m, j) b[j, :], or added to it: kVectors vectors of rows that are `stride` floats apart.
// a(m, j) = a[m * row + j * column].
template <int kRows, int kVectors, bool kAdd>
void outer_tile(float* c, const float* a, int64_t row, int64_t column, const float* b, int64_t n, int64_t stride) {
  F acc[kRows][kVectors];
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      acc[m][v] = kAdd ? Simd::load(c + m * stride + v * kLanes) : Simd::zero();
    }
  }
  for (int64_t j = 0; j < n; ++j) {
    F line[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) line[v] = Simd::load(b + j * stride + v * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const F factor = Simd::broadcast(a[m * row + j * column]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) acc[m][v] = Simd::fma(factor, line[v], acc[m][v]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) Simd::store(c + m * stride + v * kLanes, acc[m][v]);
  }
}

template <int kVectors, bool kAdd>
void outer_columns(float* c, int64_t rows, const float* a, int64_t row, int64_t column, const float* b, int64_t n,
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
template <bool kAdd, int kVectors = Simd::kOuterVectors>
void outer_product(float* c, int64_t rows, const float* a, int64_t row, int64_t column, const float* b, int64_t n) {
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

}  // namespace
}  // namespace eqxcallback::cpu
