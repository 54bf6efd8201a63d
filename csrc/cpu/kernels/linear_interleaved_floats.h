// Few rows of x times blocks of 16 rows side by side, in f32. A vector has four neighbouring weights of each of a few
// rows, as they are in memory, and meets four numbers of x as often as it has rows.
#pragma once

#include "cpu/kernels/linear_interleaved.h"

namespace eqxcallback::cpu {
namespace {

inline constexpr int kVectorRows = kLanes / 4, kVectorsOfGroup = static_cast<int>(kGroupRows) / kVectorRows;
inline constexpr int kFoursOfBlock = static_cast<int>(kBlockSize) / 4;

// body(j, digits) for the weights 4 * j to 4 * j + 3 of the rows of kVectors vectors.
template <Encoding encoding, int kVectors, class Body>
[[gnu::always_inline]] inline void for_vectors_of_fours(const uint8_t* bytes, const Body& body) {
#pragma GCC unroll 8
  for (int i = 0; i < GroupBlock<encoding>::kFours; ++i, bytes += 4 * kGroupRows) {
    const auto decoded = [&](int j, const auto& decode) __attribute__((always_inline)) {
      F digits[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) digits[v] = decode(bytes + v * kLanes);
      body(j, digits);
    };
    if constexpr (encoding == Encoding::kQ4_1_R16) {
      decoded(i, Simd::low_nibbles);
      decoded(4 + i, Simd::high_nibbles);
    } else {
      decoded(i, Simd::int8s);
    }
  }
}

// Computes out[i, r]: row i of kX rows of x, each four of whose numbers is there kVectorRows times, times the rows of
// kVectors vectors, without minimums.
template <int kLocality, Encoding encoding, int kX, int kVectors>
[[gnu::always_inline]] inline void scaled_sums(float* out, const uint8_t* group, int first, const float* fours,
                                               int64_t num_blocks) {
  F total[kX][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kX; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) total[i][v] = Simd::zero();
  }
  for (int64_t b = 0; b < num_blocks; ++b, group += GroupBlock<encoding>::kBytes) {
    if (first == 0) prefetch<kLocality>(group + kGroupAhead, GroupBlock<encoding>::kBytes);
    F dot[kX][kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kX; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) dot[i][v] = Simd::zero();
    }
    const uint8_t* bytes = group + GroupBlock<encoding>::kHeadBytes + first * kLanes;
    for_vectors_of_fours<encoding, kVectors>(
        bytes, [&](int j, const F(&digits)[kVectors]) __attribute__((always_inline)) {
#pragma GCC unroll 8
          for (int i = 0; i < kX; ++i) {
            const F of_x = Simd::load(fours + ((i * num_blocks + b) * kFoursOfBlock + j) * kLanes);
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) dot[i][v] = Simd::fma(digits[v], of_x, dot[i][v]);
          }
        });
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const F scales = Simd::fours_of_halves(group + 2 * (first + v) * kVectorRows);
#pragma GCC unroll 8
      for (int i = 0; i < kX; ++i) total[i][v] = Simd::fma(dot[i][v], scales, total[i][v]);
    }
  }
  float lanes[kLanes];
  for (int i = 0; i < kX; ++i) {
    for (int v = 0; v < kVectors; ++v) {
      Simd::store(lanes, total[i][v]);
      for (int r = 0; r < kVectorRows; ++r) {
        const float* four = lanes + 4 * r;
        out[i * kGroupRows + v * kVectorRows + r] = (four[0] + four[1]) + (four[2] + four[3]);
      }
    }
  }
}

// Adds the minimums of a group's blocks, times the sums of a row of x over these.
template <Encoding encoding>
void add_minimums(float* out, const uint8_t* group, const float* sums, int64_t num_blocks) {
  using Block = GroupBlock<encoding>;
  F total[kGroupVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kGroupVectors; ++v) total[v] = Simd::load(out + v * kLanes);
  for (int64_t b = 0; b < num_blocks; ++b, group += Block::kBytes) {
#pragma GCC unroll 4
    for (int v = 0; v < kGroupVectors; ++v) {
      total[v] = Simd::fma(Block{group, v}.minimums(), Simd::broadcast(sums[b]), total[v]);
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < kGroupVectors; ++v) Simd::store(out + v * kLanes, total[v]);
}

// False if x is to be quantised first, or not finite, or so high that sums of it are not.
template <Encoding encoding, class T>
bool multiply_group_floats(const QuantizedLinear& args, const float* x, const Executor& executor) {
  if (args.quantized_activations || magnitude_of(x, args.rows * args.in_features) > kSummable) return false;
  const int64_t num_blocks = args.in_features / kBlockSize;
  Scratch sums(args.rows * num_blocks), fours(args.rows * args.in_features * kVectorRows);
  for (int64_t b = 0; b < args.rows * num_blocks; ++b) {
    sums.data()[b] = sum_of(
        kBlockSize, [&](F acc, int64_t i, auto count) { return Simd::add(acc, load(x + b * kBlockSize + i, count)); });
  }
  for (int64_t i = 0; i < args.rows * args.in_features; i += 4) {
    for (int r = 0; r < kVectorRows; ++r) {
      std::memcpy(fours.data() + i * kVectorRows + 4 * r, x + i, 4 * sizeof(float));
    }
  }
  parallel_for(
      executor, args.out_features, static_cast<double>(num_blocks) * (0.6 + 0.6 * static_cast<double>(args.rows)),
      [&](int64_t begin, int64_t end) {
        for_groups<encoding>(args, begin, end, [&](const uint8_t* group, int64_t o) {
          for_few_rows(args.rows, [&](auto count, int64_t first) {
            constexpr int kX = decltype(count)::value;
            // So many sums that they do not wait for each other.
            constexpr int kVectors = kX <= 2 ? 4 : 2;
            float result[kX][kGroupRows];
            for (int v = 0; v < kVectorsOfGroup; v += kVectors) {
              with_locality(args.prefetching, [&](auto locality) __attribute__((always_inline)) {
                scaled_sums<decltype(locality)::value, encoding, kX, kVectors>(
                    result[0] + v * kVectorRows, group, v, fours.data() + first * args.in_features * kVectorRows,
                    num_blocks);
              });
            }
            for (int i = 0; i < kX; ++i) {
              if constexpr (GroupBlock<encoding>::kHasMinimums) {
                add_minimums<encoding>(result[i], group, sums.data() + (first + i) * num_blocks, num_blocks);
              }
              for (int r = 0; r < kGroupRows; ++r) {
                from_float(result[i][r], static_cast<T*>(args.out)[(first + i) * args.out_features + o + r]);
              }
            }
          });
        });
      },
      kGroupRows);
  return true;
}

}  // namespace
}  // namespace eqxcallback::cpu
