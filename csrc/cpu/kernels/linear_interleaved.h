// Linear layers over blocks of 16 rows side by side, see Encoding::kQ4_1_R16. Rows are along the lanes: one load has
// the scales of all of them, and no sums over lanes are left. Few rows of x are multiplied as bytes,
// linear_interleaved_bytes.h, or in f32, linear_interleaved_floats.h; for many a group of rows is decoded into cache.
#pragma once

#include "cpu/kernels/linear_activations.h"
#include "cpu/kernels/outer.h"

namespace eqxcallback::cpu {
namespace {

inline constexpr int kGroupVectors = static_cast<int>(kGroupRows) / kLanes;
static_assert(kGroupRows % kLanes == 0);
// So many bytes ahead are fetched: a group is one stream, which the processor follows no further than a page.
inline constexpr int64_t kGroupAhead = 8192;

// What one vector has of the rows of a block.
template <Encoding encoding>
struct GroupBlock {
  using Dwords = int32_t __attribute__((vector_size(4 * kLanes)));
  static constexpr bool kHasMinimums = encoding == Encoding::kQ4_1_R16;
  static constexpr int64_t kHeadBytes = (kHasMinimums ? 4 : 2) * kGroupRows;
  static constexpr int kFours = kHasMinimums ? 4 : 8;  // fours of bytes of a row
  static constexpr int64_t kBytes = kGroupRows * block_bytes(encoding);
  const uint8_t* block;
  int vector;

  F scales() const { return half(0); }
  F minimums() const { return half(kGroupRows); }
  // The bytes 4 * i to 4 * i + 3 of each row. In Q4_1 weight j is the low half of byte j, weight 16 + j the high one.
  Dwords fours(int64_t i) const {
    Dwords x;
    std::memcpy(&x, block + kHeadBytes + 4 * (i * kGroupRows + vector * kLanes), sizeof(x));
    return x;
  }
  // body(j, digits) for the weights of the block, those of Q4_1 from low halves and high ones in turns.
  template <class Body>
  [[gnu::always_inline]] void for_digits(const Body& body) const {
    if constexpr (encoding == Encoding::kQ4_1_R16) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const Dwords packed = fours(i);
#pragma GCC unroll 8
        for (int n = 0; n < 8; ++n) {
          body(4 * i + n / 2 + n % 2 * 16, __builtin_convertvector((packed >> (4 * n)) & 15, F));
        }
      }
    } else {
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        const Dwords packed = fours(i);
#pragma GCC unroll 4
        for (int n = 0; n < 4; ++n) body(4 * i + n, __builtin_convertvector(packed << (24 - 8 * n) >> 24, F));
      }
    }
  }

 private:
  F half(int64_t first) const { return Simd::load(reinterpret_cast<const F16*>(block) + first + vector * kLanes); }
};

// body(group, o) for the groups of rows from `begin` to `end`.
template <Encoding encoding, class Body>
[[gnu::always_inline]] inline void for_groups(const QuantizedLinear& args, int64_t begin, int64_t end,
                                              const Body& body) {
  const int64_t bytes = args.in_features / kBlockSize * GroupBlock<encoding>::kBytes;
  for (int64_t o = begin; o < end; o += kGroupRows) body(args.blocks + o / kGroupRows * bytes, o);
}

// Many rows of x, or such that have no form in which they are faster.
template <Encoding encoding, class T>
void multiply_group_panels(const QuantizedLinear& args, const float* x, const Executor& executor) {
  const int64_t size = args.in_features, num_blocks = size / kBlockSize;
  const auto decode = [&](float* panel, const uint8_t* group) {
    for (int64_t b = 0; b < num_blocks; ++b, panel += kBlockSize * kGroupRows) {
      for (int v = 0; v < kGroupVectors; ++v) {
        using Block = GroupBlock<encoding>;
        const Block block{group + b * Block::kBytes, v};
        const F scales = block.scales(), minimums = Block::kHasMinimums ? block.minimums() : Simd::zero();
        block.for_digits([&](int j, F digits) __attribute__((always_inline)) {
          Simd::store(panel + j * kGroupRows + v * kLanes, Simd::fma(digits, scales, minimums));
        });
      }
    }
  };
  parallel_for(
      executor, args.out_features, static_cast<double>(num_blocks) * (1.5 + 0.5 * static_cast<double>(args.rows)),
      [&](int64_t begin, int64_t end) {
        Scratch panel(size * kGroupRows);
        for_groups<encoding>(args, begin, end, [&](const uint8_t* group, int64_t o) {
          decode(panel.data(), group);
          const auto tile = [&](auto count, int64_t r) {
            constexpr int kRows = decltype(count)::value;
            F sums[kRows][kGroupVectors];
#pragma GCC unroll 8
            for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
              for (int v = 0; v < kGroupVectors; ++v) sums[i][v] = Simd::zero();
            }
            add_outer(sums, x + r * size, size, 1, panel.data(), size, kGroupRows);
            T* out = static_cast<T*>(args.out) + r * args.out_features + o;
#pragma GCC unroll 8
            for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
              for (int v = 0; v < kGroupVectors; ++v) Simd::store(out + i * args.out_features + v * kLanes, sums[i][v]);
            }
          };
          for_few_rows<Simd::kOuterRows>(args.rows, tile);
        });
      },
      kGroupRows);
}

}  // namespace
}  // namespace eqxcallback::cpu
