// Many rows that are quantised to int8 times rows of int8: weights are put along the lanes, a panel of them at a time,
// so that no sum goes across lanes.
#pragma once

#include "cpu/kernels/linear_byte_rows.h"
#include "cpu/kernels/outer.h"

namespace eqxcallback::cpu {
namespace {

inline constexpr int64_t kPanelSize = int64_t{1} << 16;  // an integer has room for the sum of so many products
inline constexpr int64_t kPanel = Simd::kOuterVectors * kLanes;

// Fills panel[i, w] with four neighbours of row w, as weights, or with signs and zeros up to a whole vector. Weights
// past the row's end meet zeros in x.
template <bool kHasSigns = false>
void arrange_weights(ByteFour* panel, const int8_t* weights, int64_t rows, int64_t size) {
  for (int64_t w = 0; w < kPanel; w += kLanes) {
    for (int64_t i = 0; i < size; i += kBytes) {
      const int64_t bytes = smaller(kBytes, size - i);
      const Bytes::Mask mask = Bytes::first(bytes);
      F fours[kLanes];
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) {
        const Bytes::Mask lanes = w + r < rows ? mask : 0;
        const Ints signed_bytes = Bytes::load(weights + (w + r) * size + i, lanes);
        fours[r] = reinterpret_cast<F>(kHasSigns ? signed_bytes : Bytes::as_weights(signed_bytes));
      }
      Simd::transpose(fours);
      for (int64_t j = 0; j < (kHasSigns ? kLanes : (bytes + 3) / 4); ++j)
        store_fours(panel + (i / 4 + j) * kPanel + w, fours[j]);
    }
  }
}

// Computes out = x W^T scale: kRows rows from `first` on, and `columns` columns of the panel.
template <int kRows, class T>
void panel_tile(T* out, int64_t out_stride, const ByteRows& x, int64_t first, const ByteFour* panel, int64_t size,
                const float* scale, int64_t columns) {
  constexpr int kVectors = Simd::kOuterVectors;
  Ints acc[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) acc[r][v] = Ints{};
  }
  add_outer(acc, reinterpret_cast<const ByteFour*>(x.integers(first)), x.stride() / 4, 1, panel, (size + 3) / 4,
            kPanel);
  alignas(64) int32_t sums[kRows][kPanel];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) Bytes::store(sums[r] + v * kLanes, acc[r][v]);
  }
  for (int r = 0; r < kRows; ++r) {
    const Ints offset = Ints{} + Bytes::sum(x.offset(first + r));
    const F steps = Simd::broadcast(x.scale(first + r));
    for_vectors(columns, [&](int64_t i, auto count) {
      const F scaled = Simd::mul(__builtin_convertvector(Bytes::load(sums[r] + i) + offset, F), steps);
      store(out + r * out_stride + i, Simd::mul(scaled, load(scale + i, count)), count);
    });
  }
}

template <class T>
void multiply_panels(T* out, const ByteRows& x, int64_t num_rows, const int8_t* weights, const float* scale,
                     int64_t num_weights, int64_t size, const Executor& executor) {
  const double nanoseconds = static_cast<double>(size) * (0.02 + 0.005 * static_cast<double>(num_rows));
  parallel_for(
      executor, num_weights, nanoseconds,
      [&](int64_t begin, int64_t end) {
        Scratch scratch((size + 3) / 4 * kPanel);
        auto* panel = reinterpret_cast<ByteFour*>(scratch.data());
        for (int64_t o = begin; o < end; o += kPanel) {
          const int64_t columns = smaller(kPanel, end - o);
          arrange_weights(panel, weights + o * size, columns, size);
          const auto tile = [&](auto rows, int64_t r) {
            panel_tile<decltype(rows)::value>(out + r * num_weights + o, num_weights, x, r, panel, size, scale + o,
                                              columns);
          };
          int64_t r = 0;
          for (; r + Simd::kOuterRows <= num_rows; r += Simd::kOuterRows) tile(Int<Simd::kOuterRows>{}, r);
          for (; r + 2 <= num_rows; r += 2) tile(Int<2>{}, r);
          for (; r < num_rows; ++r) tile(Int<1>{}, r);
        }
      },
      kPanel);
}

}  // namespace
}  // namespace eqxcallback::cpu
