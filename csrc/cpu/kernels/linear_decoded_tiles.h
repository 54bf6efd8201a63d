// Several rows of x times quantised weights in f32: each block is decoded into registers, scaled, and multiplied with
// all rows of a tile. So few rows do not pay for putting weights side by side, see linear_digit_panels.h.
#pragma once

#include "cpu/kernels/linear_activations.h"
#include "cpu/kernels/linear_block_decode.h"

namespace eqxcallback::cpu {
namespace {

// Computes out[i, r]: row i of kX rows of x, times rows[r].
template <Encoding encoding, int kX, int kRows>
[[gnu::noinline]] void decoded_tile(float* out, const uint8_t* const* rows, const float* x, int64_t num_blocks) {
  constexpr int kSums = kX * kRows, kPadded = (kSums + kLanes - 1) / kLanes * kLanes;
  F acc[kPadded];
#pragma GCC unroll 32
  for (int i = 0; i < kPadded; ++i) acc[i] = Simd::zero();
  for (int64_t b = 0; b < num_blocks; ++b) {
    F weights[kRows][kBlockSize / kLanes];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      for_weight_vectors<encoding>(rows[r] + b * block_bytes(encoding),
                                   [&](int j, F values) { weights[r][j / kLanes] = values; });
    }
#pragma GCC unroll 8
    for (int i = 0; i < kX; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < kBlockSize / kLanes; ++j) {
        const F v = Simd::load(x + (i * num_blocks + b) * kBlockSize + j * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) acc[i * kRows + r] = Simd::fma(v, weights[r][j], acc[i * kRows + r]);
      }
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < kPadded; i += kLanes) Simd::store(out + i, Simd::sums(acc + i));
}

// x has at most 6 rows: more sums do not fit into registers.
template <Encoding encoding, class T>
void multiply_tiles(const QuantizedLinear& args, const float* x, const Executor& executor) {
  constexpr int kRows = 4;
  constexpr Encoding kUnpacked = unpacked(encoding);
  const int64_t num_blocks = args.in_features / kBlockSize, stride = num_blocks * block_bytes(kUnpacked);
  const auto tile = [&](float* sums, const uint8_t* const* rows) {
    switch (args.rows) {
      case 1:
        return decoded_tile<kUnpacked, 1, kRows>(sums, rows, x, num_blocks);
      case 2:
        return decoded_tile<kUnpacked, 2, kRows>(sums, rows, x, num_blocks);
      case 3:
        return decoded_tile<kUnpacked, 3, kRows>(sums, rows, x, num_blocks);
      case 4:
        return decoded_tile<kUnpacked, 4, kRows>(sums, rows, x, num_blocks);
      case 5:
        return decoded_tile<kUnpacked, 5, kRows>(sums, rows, x, num_blocks);
      case 6:
        return decoded_tile<kUnpacked, 6, kRows>(sums, rows, x, num_blocks);
      default:
        return;
    }
  };
  parallel_for(
      executor, args.out_features, static_cast<double>(num_blocks) * (0.55 + 0.25 * static_cast<double>(args.rows)),
      [&](int64_t first_row, int64_t last_row) {
        for_unpacked_rows<encoding>(
            args.blocks, args.in_features, first_row, last_row, [&](const uint8_t* blocks, int64_t begin, int64_t end) {
              // Long streams, see few_rows.h.
              const int64_t part = (end - begin + kRows - 1) / kRows;
              for (int64_t o = begin; o < begin + part; ++o) {
                const uint8_t* rows[kRows];
                for (int r = 0; r < kRows; ++r) rows[r] = blocks + (smaller(o + r * part, end - 1) - begin) * stride;
                float sums[6 * kRows + kLanes];
                tile(sums, rows);
                for (int64_t i = 0; i < args.rows; ++i) {
                  for (int r = 0; r < kRows && o + r * part < end; ++r) {
                    from_float(sums[i * kRows + r], static_cast<T*>(args.out)[i * args.out_features + o + r * part]);
                  }
                }
              }
            });
      },
      8);
}

}  // namespace
}  // namespace eqxcallback::cpu
