// The factors of a product of matrices, and its result.
#pragma once

#include "cpu/kernels/common.h"
#include "cpu/product_plan.h"

namespace eqxcallback::cpu {
namespace {

// The rows of a matrix, or its columns, along which a product sums.
template <class T>
struct FactorLines {
  const T* data;
  int64_t count, size, stride;
  bool are_columns;  // the matrix is [size, count], and not [count, size]

  FactorLines part(int64_t line, int64_t lines, int64_t at, int64_t numbers) const {
    const T* from = data + (are_columns ? at * stride + line : line * stride + at);
    return {from, smaller(lines, count - line), smaller(numbers, size - at), stride, are_columns};
  }
};

// Where sums go: rows of the result, and the numbers that are added to its columns, if any. Or they are added to what
// is there.
template <class T>
struct PartOfResult {
  T* out;
  int64_t stride, rows, columns;
  const float* bias;
  bool is_added;

  PartOfResult part(int64_t row, int64_t column, int64_t most_rows, int64_t most_columns) const {
    return {out + row * stride + column,
            stride,
            smaller(most_rows, rows - row),
            smaller(most_columns, columns - column),
            bias == nullptr ? nullptr : bias + column,
            is_added};
  }

  template <class Count>
  void put(int64_t row, int64_t i, F sums, Count count) const {
    if (bias != nullptr) sums = Simd::add(sums, load(bias + i, count));
    if (is_added) sums = Simd::add(sums, load(out + row * stride + i, count));
    store(out + row * stride + i, sums, count);
  }
};

}  // namespace
}  // namespace eqxcallback::cpu
