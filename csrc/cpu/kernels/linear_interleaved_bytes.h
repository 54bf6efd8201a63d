// Rows of x as digits, see linear_digits.h, times blocks of 16 rows side by side. Four neighbouring weights of
// a row are a lane, which a dword of x meets: the products of bytes are all that is left to do. Many rows are
// multiplied so as well, as f32 takes as many instructions; each gets what it gets alone.
#pragma once

#include "cpu/kernels/linear_digit_sums.h"
#include "cpu/kernels/linear_interleaved.h"

namespace eqxcallback::cpu {
namespace {

// body(j, weights) for the fours 4 * j to 4 * j + 3 of a block's 32 weights.
template <Encoding encoding, class Body>
[[gnu::always_inline]] inline void for_fours(const GroupBlock<encoding>& block, const Body& body) {
  if constexpr (encoding == Encoding::kQ4_1_R16) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const Ints both = block.fours(j);
      constexpr int32_t kNibbles = 0x0f0f0f0f;
      body(j, both & kNibbles);
      body(4 + j, (both >> 4) & kNibbles);
    }
  } else {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) body(j, Bytes::as_weights(block.fours(j)));
  }
}

// kX rows of x, as digits, times the rows of one vector.
template <int kLocality, Encoding encoding, int kDigits, int kX>
[[gnu::always_inline]] inline void digit_sums(F (&total)[kX], const uint8_t* group, int vector,
                                              const LaneBlock<kDigits>* x, int64_t num_blocks) {
#pragma GCC unroll 8
  for (int i = 0; i < kX; ++i) total[i] = Simd::zero();
  for (int64_t b = 0; b < num_blocks; ++b) {
    using Block = GroupBlock<encoding>;
    const Block block{group + b * Block::kBytes, vector};
    if (vector == 0) prefetch<kLocality>(block.block + kGroupAhead, Block::kBytes);
    Ints sums[kX][kDigits] = {};
    if constexpr (encoding == Encoding::kQ8_0_R16) {
#pragma GCC unroll 8
      for (int i = 0; i < kX; ++i) {
        const LaneBlock<kDigits>& of_x = x[i * num_blocks + b];
        sums[i][0] += of_x.lower[0];
        if constexpr (kHasUpper<encoding, kDigits>) sums[i][1] += of_x.upper[0];
      }
    }
    for_fours(block, [&](int j, Ints weights) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int i = 0; i < kX; ++i) {
        const LaneBlock<kDigits>& of_x = x[i * num_blocks + b];
#pragma GCC unroll 3
        for (int d = 0; d < kDigits; ++d) {
          const auto* fours = reinterpret_cast<const ByteFour*>(of_x.digits[d]);
          sums[i][d] = Simd::fma(factor_of(fours + j), weights, sums[i][d]);
        }
      }
    });
    const F scales = block.scales();
#pragma GCC unroll 8
    for (int i = 0; i < kX; ++i) {
      const LaneBlock<kDigits>& of_x = x[i * num_blocks + b];
      total[i] = Simd::fma(dot_of_digits<encoding>(sums[i], of_x.lower_scale, of_x.upper_scale), scales, total[i]);
      if constexpr (Block::kHasMinimums) {
        total[i] = Simd::fma(block.minimums(), Simd::broadcast(of_x.sum), total[i]);
      }
    }
  }
}

// False if x has no form in bytes.
template <Encoding encoding, int kDigits, class T>
bool multiply_group_digits(const QuantizedLinear& args, const float* x, const Executor& executor) {
  constexpr int kRows = kDigits == 1 ? 8 : 6;  // more sums do not fit into registers
  const int64_t num_blocks = args.in_features / kBlockSize;
  // So many rows of weights at a time that they stay in the second cache.
  const int64_t bytes = larger<int64_t>(1, num_blocks) * GroupBlock<encoding>::kBytes;
  const int64_t rows_of_part = larger<int64_t>(1, (int64_t{1} << 18) / bytes) * kGroupRows;
  LaneRows<encoding, kDigits> lanes(args.rows, num_blocks, kRows);
  for (int64_t first = 0; first < args.rows; first += lanes.step()) {
    const int64_t num_rows = smaller(lanes.step(), args.rows - first);
    if (!lanes.set(x + first * args.in_features, num_rows, executor)) return false;
    // A row alone is about as fast as its weights come from memory.
    const double of_rows = (kDigits == 3 ? 0.22 : 0.1) * static_cast<double>(num_rows);
    parallel_for(
        executor, args.out_features, static_cast<double>(num_blocks) * (0.6 + of_rows),
        [&](int64_t begin, int64_t end) {
          for (int64_t part = begin; part < end; part += rows_of_part) {
            for_few_rows<kRows>(num_rows, [&](auto count, int64_t r) {
              constexpr int kX = decltype(count)::value;
              for_groups<encoding>(args, part, smaller(part + rows_of_part, end), [&](const uint8_t* group, int64_t o) {
                for (int v = 0; v < kGroupVectors; ++v) {
                  F total[kX];
                  with_locality(args.prefetching, [&](auto locality) __attribute__((always_inline)) {
                    digit_sums<decltype(locality)::value, encoding, kDigits>(total, group, v, lanes.row(r), num_blocks);
                  });
                  T* out = static_cast<T*>(args.out) + (first + r) * args.out_features + o + v * kLanes;
#pragma GCC unroll 8
                  for (int i = 0; i < kX; ++i) Simd::store(out + i * args.out_features, total[i]);
                }
              });
            });
          }
        },
        kGroupRows);
  }
  return true;
}

}  // namespace
}  // namespace eqxcallback::cpu
