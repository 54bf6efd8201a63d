// Tools that the kernels of attention share: products of tiles with rows along the vector lanes, and rows of one head.
#pragma once

#include "cpu/kernels/attention_products.h"
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

// The product with queries along the lanes: kQueryBlock queries, of which kVectors vectors count.
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

// Rows of one head as f32: in their own memory, or widened into `buffer`.
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

// Calls body(d, i, x) for the vectors x of elements d of rows i, i + 1 and so on, with zeros past
// the last row.
template <class T, class Body>
void for_columns(const T* x, int64_t stride, int64_t rows, int64_t size, const Body& body) {
  for (int64_t i = 0; i < rows; i += kLanes) {
    for_vectors(size, [&](int64_t d, auto count) {
      F tile[kLanes];
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) tile[r] = i + r < rows ? load(x + (i + r) * stride + d, count) : Simd::zero();
      Simd::transpose(tile);
      for (int64_t c = 0; c < smaller<int64_t>(kLanes, size - d); ++c) body(d + c, i, tile[c]);
    });
  }
}

// out[i, d] = x[d, i] * factor(i), where factor gives vectors, and rows of x are kQueryBlock apart.
template <class T, class Factor>
void store_columns(T* out, int64_t stride, int64_t rows, int64_t size, const float* x, const Factor& factor) {
  for (int64_t i = 0; i < rows; i += kLanes) {
    const F factors = factor(i);
    for_vectors(size, [&](int64_t d, auto count) {
      F tile[kLanes];
#pragma GCC unroll 16
      for (int c = 0; c < kLanes; ++c) {
        tile[c] = d + c < size ? Simd::mul(Simd::load(x + (d + c) * kQueryBlock + i), factors) : Simd::zero();
      }
      Simd::transpose(tile);
      for (int64_t r = 0; r < smaller<int64_t>(kLanes, rows - i); ++r)
        store(out + (i + r) * stride + d, tile[r], count);
    });
  }
}

// Lines of floats, [size, kQueryBlock], and what tiles multiply of them.
struct Arranged {
  float* lines;
  RightPairs pairs;
  bool by_tiles;
};

// Lines of queries that are not split.
template <class T>
Arranged arranged_lines(float* lines, int64_t size) {
  return {lines, {lines, kQueryBlock, 0, 1}, kHasTiles<T> && in_tiles(size)};
}

// Queries, or their cotangents, as `row_products` wants them, [size, kQueryBlock] with zeros from row `rows` on: times
// `factor` in f32, or where the processor multiplies T in pairs, pairs of neighbouring d as they are. If wanted, f32 is
// split, into memory behind the lines.
template <class T>
bool in_pairs(int64_t size) {
  return kHasPairs<T> && size % 2 == 0;
}
template <class T>
Arranged arrange_queries(float* out, const T* x, int64_t stride, int64_t rows, int64_t size, float factor,
                         bool splits) {
  if (rows <= kQueryBlock - kLanes) std::memset(out, 0, static_cast<size_t>(size * kQueryBlock) * sizeof(float));
  if (in_pairs<T>(size)) {
    const auto* pairs = reinterpret_cast<const float*>(x);
    for_columns(pairs, stride / 2, rows, size / 2,
                [&](int64_t d, int64_t i, F pair) { Simd::store(out + d * kQueryBlock + i, pair); });
  } else {
    for_columns(x, stride, rows, size, [&](int64_t d, int64_t i, F column) {
      Simd::store(out + d * kQueryBlock + i, Simd::mul(column, Simd::broadcast(factor)));
    });
  }
  Arranged arranged = arranged_lines<T>(out, size);
  if constexpr (kIsSplit<T>) {
    if (splits) {
      arranged.pairs = pairs_of_lines<T>(out + size * kQueryBlock, kQueryBlock);
      arranged.by_tiles = has_terms(split_into_pairs<T>(arranged.pairs, out, size, kQueryBlock));
    }
  }
  return arranged;
}

// The rows of a block of keys, or of their values, as a left factor: bf16 where they are, and f32 in terms, which
// several blocks of queries meet in turn. Its memory is for T that is widened, too.
struct KeyRows {
  float* memory;  // [kKeyBlock, D], or [kKeyBlock, terms, D] of bf16
  const void* of = nullptr;
  int64_t rows = 0;
  float highest = 0;

  // Returns the factor, which has no terms if it cannot be split.
  template <class T>
  LeftRows factor(const T* x, int64_t stride, int64_t count, int64_t size) {
    if constexpr (kIsSplit<T>) {
      auto* terms = reinterpret_cast<Bf16*>(memory);
      if (x != of || count != rows) highest = split_rows(terms, x, stride, count, size);
      of = x, rows = count;
      return {terms, 3 * size, size, has_terms(highest) ? 3 : 0};
    } else {
      return {x, stride, 0, 1};
    }
  }
  template <class T>
  static int64_t floats(int64_t size) {
    return kIsSplit<T> ? floats_of_terms<T>(kKeyBlock, size) : kKeyBlock * size;
  }
};

// out[m, :] = factor * sum_d x[m, d] q[d, :] of queries that `arrange_queries` has arranged with that factor.
template <int kVectors, class T>
void row_products(float* out, const T* x, int64_t stride, int64_t rows, int64_t size, const Arranged& queries,
                  float factor, KeyRows& keys) {
  bool is_done = false;
  if constexpr (kByTiles<T>) {
    const LeftRows left = queries.by_tiles ? keys.factor(x, stride, rows, size) : LeftRows{};
    is_done = left.terms > 0;
    if (is_done) tile_product<false>(out, kQueryBlock, rows, left, queries.pairs, size / kTileSize, kVectors * kLanes);
  }
  if constexpr (kHasPairs<T>) {
    if (in_pairs<T>(size)) {
      if (!is_done) {
        outer_product<false, kVectors>(out, rows, reinterpret_cast<const Bf16Pair*>(x), stride / 2, 1,
                                       reinterpret_cast<const Bf16Pair*>(queries.lines), size / 2);
      }
      if (factor == 1) return;
      for (int64_t i = 0; i < rows * kQueryBlock; i += kLanes) {
        Simd::store(out + i, Simd::mul(Simd::load(out + i), Simd::broadcast(factor)));
      }
      return;
    }
  }
  if (is_done) return;
  const Rows floats = as_floats(x, stride, rows, size, keys.memory);
  outer_product<false, kVectors>(out, rows, floats.data, floats.stride, 1, queries.lines, size);
}

}  // namespace
}  // namespace eqxcallback::cpu
