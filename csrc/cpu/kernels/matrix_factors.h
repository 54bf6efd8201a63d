// The factors of a product of matrices, and its result.
#pragma once

#include "cpu/kernels/common.h"

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

// Where sums go: rows of the result, and the numbers that are added to its columns, if any. Where a product is summed
// in several stages, those before the last one leave sums of f32 that the next one adds to: in the result, if it is
// f32.
template <class T>
struct PartOfResult {
  T* out;
  int64_t stride, rows, columns;
  const float* bias;
  float* so_far = nullptr;
  int64_t so_far_stride = 0;
  bool is_first = true, is_last = true;

  PartOfResult part(int64_t row, int64_t column, int64_t most_rows, int64_t most_columns) const {
    PartOfResult to = *this;
    to.out += row * stride + column;
    to.rows = smaller(most_rows, rows - row), to.columns = smaller(most_columns, columns - column);
    if (bias != nullptr) to.bias += column;
    if (so_far != nullptr) to.so_far += row * so_far_stride + column;
    return to;
  }

  // The same in a stage: the sums of `size` numbers that begin `at` one of `of_all`.
  PartOfResult stage(int64_t at, int64_t size, int64_t of_all) const {
    PartOfResult to = *this;
    to.is_first = at == 0, to.is_last = at + size >= of_all;
    return to;
  }

  float* sums_of(int64_t row) const { return so_far + row * so_far_stride; }

  template <class Count>
  void put(int64_t row, int64_t i, F sums, Count count) const {
    if (!is_first) sums = Simd::add(sums, load(sums_of(row) + i, count));
    if (!is_last) return store(sums_of(row) + i, sums, count);
    if (bias != nullptr) sums = Simd::add(sums, load(bias + i, count));
    store(out + row * stride + i, sums, count);
  }
};

}  // namespace
}  // namespace eqxcallback::cpu
