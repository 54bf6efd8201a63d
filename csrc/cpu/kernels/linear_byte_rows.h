// Rows of x that are quantised to int8 times rows of int8, by the products of bytes of the processor. The sums of a
// lane are exact integers.
#pragma once

#include "cpu/kernels/linear_digits.h"

namespace eqxcallback::cpu {
namespace {

inline constexpr int64_t kBytes = 4 * kLanes;  // in a vector

// Rows as integers, with zeros up to a whole number of vectors. After the last one there is memory for more, up to a
// multiple of kMultiple, in which there is anything.
class ByteRows {
 public:
  static constexpr int64_t kMultiple = kHasTiles<Bf16> ? 32 : 1;

  ByteRows(int64_t num_rows, int64_t size)
      : padded_((size + kBytes - 1) / kBytes * kBytes),
        rows_((num_rows + kMultiple - 1) / kMultiple * kMultiple),
        scratch_(rows_ * (padded_ / 4 + kLanes + 1) + 1) {
    offsets_ = reinterpret_cast<int32_t*>(scratch_.data());
    integers_ = reinterpret_cast<int8_t*>(offsets_ + rows_ * kLanes);
    scales_ = reinterpret_cast<float*>(integers_ + rows_ * padded_);
  }

  const int8_t* integers(int64_t r) const { return integers_ + r * padded_; }
  int64_t stride() const { return padded_; }
  // The excess of the products, negated: that of the weights times the sums of the integers in each lane.
  Ints offset(int64_t r) const { return Bytes::load(offsets_ + r * kLanes); }
  float scale(int64_t r) const { return scales_[r]; }

  // Sets row r. Returns false if x is not finite.
  bool set(int64_t r, const float* x, int64_t size) {
    Steps steps;
    if (!steps_of(steps, x, size)) return false;
    int8_t* out = integers_ + r * padded_;
    if (padded_ > 0) std::memset(out + padded_ - kBytes, 0, kBytes);
    const F inverse = Simd::broadcast(steps.inverse);
    for_vectors(size, [&](int64_t i, auto count) {
      Bytes::store_lowest(out + i, Bytes::nearest(Simd::mul(load(x + i, count), inverse)));
    });
    Ints sum{};
    for (int64_t i = 0; i < padded_; i += kBytes) sum = Simd::fma(Bytes::load(out + i), Bytes::as_weights(Ints{}), sum);
    Bytes::store(offsets_ + r * kLanes, -sum);
    scales_[r] = steps.scale;
    return true;
  }

 private:
  int64_t padded_, rows_;
  Scratch scratch_;
  int32_t* offsets_;
  int8_t* integers_;
  float* scales_;
};

// Computes out[r * kWeights + w], the sum of products of row `first` + r of x and rows[w]. Never inlined, like `dots`.
template <int kRows, int kWeights>
[[gnu::noinline]] void byte_sums(float* out, const ByteRows& x, int64_t first, const int8_t* const* rows, int64_t size,
                                 const Prefetching& prefetching) {
  Ints acc[kRows][kWeights];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int w = 0; w < kWeights; ++w) acc[r][w] = x.offset(first + r);
  }
  const int8_t* integers = x.integers(first);
  const int64_t stride = x.stride();
  const auto step = [&](int64_t i, const auto& load_weights) __attribute__((always_inline)) {
    Ints weights[kWeights];
#pragma GCC unroll 8
    for (int w = 0; w < kWeights; ++w) {
      weights[w] = Bytes::as_weights(load_weights(rows[w] + i));
      if constexpr (kRows == 1) prefetch_stream(rows[w] + i, prefetching);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Ints v = Bytes::load(integers + r * stride + i);
#pragma GCC unroll 8
      for (int w = 0; w < kWeights; ++w) acc[r][w] = Simd::fma(v, weights[w], acc[r][w]);
    }
  };
  int64_t i = 0;
  for (; i + kBytes <= size; i += kBytes) step(i, [](const int8_t* p) { return Bytes::load(p); });
  if (i < size) {
    const Bytes::Mask mask = Bytes::first(size - i);
    step(i, [&](const int8_t* p) { return Bytes::load(p, mask); });
  }
  constexpr int kSums = kWhole<kRows * kWeights>;
  F sums[kSums] = {};
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int w = 0; w < kWeights; ++w) sums[r * kWeights + w] = __builtin_convertvector(acc[r][w], F);
  }
#pragma GCC unroll 8
  for (int k = 0; k < kSums; k += kLanes) Simd::store(out + k, Simd::sums(sums + k));
}

// Calls tile(rows, weights, r, o, part), whose first two arguments are `Int`s, for all of `num_rows` rows of x and for
// the rows of weights from `begin` to `end`. A tile has the rows o, o + part, and so on; the next tile has the rows
// after them: long streams, see few_rows.h.
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

// Calls put(r, o, sum) for all rows.
template <class Put>
void multiply_few(const ByteRows& bytes, int64_t num_rows, const int8_t* weights, int64_t num_weights, int64_t size,
                  const Prefetching& prefetching, const Executor& executor, const Put& put) {
  // As many rows of x at a time as stay in the second cache.
  const int64_t step = larger<int64_t>(4, (int64_t{1} << 18) / larger<int64_t>(1, size));
  const double nanoseconds = static_cast<double>(size) * (0.04 + 0.006 * static_cast<double>(num_rows)) + 5;
  parallel_for(
      executor, num_weights, nanoseconds,
      [&](int64_t begin, int64_t end) {
        for (int64_t first = 0; first < num_rows; first += step) {
          const auto tile = [&](auto num_x, auto num_w, int64_t r, int64_t o, int64_t part) {
            constexpr int kRows = decltype(num_x)::value, kWeights = decltype(num_w)::value;
            const int8_t* rows[kWeights];
            for (int w = 0; w < kWeights; ++w) rows[w] = weights + (o + w * part) * size;
            float sums[kWhole<kRows * kWeights>];
            byte_sums<kRows, kWeights>(sums, bytes, first + r, rows, size, prefetching);
            for (int i = 0; i < kRows; ++i) {
              for (int w = 0; w < kWeights; ++w) {
                put(first + r + i, o + w * part, bytes.scale(first + r + i) * sums[i * kWeights + w]);
              }
            }
          };
          for_tiles<4, 4>(smaller(step, num_rows - first), begin, end, tile);
        }
      },
      8);
}

}  // namespace
}  // namespace eqxcallback::cpu
