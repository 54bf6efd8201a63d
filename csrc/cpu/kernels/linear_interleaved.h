// Linear layers over Q4_1 blocks of 16 rows side by side, see Encoding::kQ4_1_R16: in f32. Rows are along the lanes:
// one load has the scales of all of them, and no sums over lanes are left. Of x, few rows meet weights that are decoded
// in registers, and many a group of rows that is decoded into cache.
#pragma once

#include "cpu/kernels/linear_activations.h"
#include "cpu/kernels/outer.h"

namespace eqxcallback::cpu {
namespace {

inline constexpr int kGroupVectors = static_cast<int>(kGroupRows) / kLanes;
inline constexpr int64_t kGroupBytes = kGroupRows * block_bytes(Encoding::kQ4_1_R16);  // of a block
static_assert(kGroupRows % kLanes == 0);

// What one vector has of the rows of a block. Eight weights of a row are the nibbles of a dword.
struct GroupBlock {
  using Dwords = int32_t __attribute__((vector_size(4 * kLanes)));
  const uint8_t* block;
  int vector;

  F scales() const { return half(0); }
  F minimums() const { return half(kGroupRows); }
  // The fours of bytes 4 * i to 4 * i + 3 of each row: weight j is the low half of byte j, weight 16 + j the high one.
  Dwords fours(int64_t i) const {
    Dwords x;
    std::memcpy(&x, block + 4 * ((1 + i) * kGroupRows + vector * kLanes), sizeof(x));
    return x;
  }
  // body(j, digits) for the weights of the block, low halves and high ones in turns.
  template <class Body>
  [[gnu::always_inline]] void for_digits(const Body& body) const {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const Dwords packed = fours(i);
#pragma GCC unroll 8
      for (int n = 0; n < 8; ++n) {
        body(4 * i + n / 2 + n % 2 * 16, __builtin_convertvector((packed >> (4 * n)) & 15, F));
      }
    }
  }

 private:
  F half(int64_t first) const { return Simd::load(reinterpret_cast<const F16*>(block) + first + vector * kLanes); }
};

// body(group, o) for the groups of rows from `begin` to `end`.
template <class Body>
[[gnu::always_inline]] inline void for_groups(const QuantizedLinear& args, int64_t begin, int64_t end,
                                              const Body& body) {
  const int64_t bytes = args.in_features / kBlockSize * kGroupBytes;
  for (int64_t o = begin; o < end; o += kGroupRows) body(args.blocks + o / kGroupRows * bytes, o);
}

// Many rows of x, or such that have no form in which they are faster.
template <class T>
void multiply_group_panels(const QuantizedLinear& args, const float* x, const Executor& executor) {
  const int64_t size = args.in_features, num_blocks = size / kBlockSize;
  const auto decode = [&](float* panel, const uint8_t* group) {
    for (int64_t b = 0; b < num_blocks; ++b, panel += kBlockSize * kGroupRows) {
      for (int v = 0; v < kGroupVectors; ++v) {
        const GroupBlock block{group + b * kGroupBytes, v};
        const F scales = block.scales(), minimums = block.minimums();
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
        for_groups(args, begin, end, [&](const uint8_t* group, int64_t o) {
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

// kX rows of x, of which `sums` has the sum of each block, times the rows of one vector.
template <int kX>
[[gnu::always_inline]] inline void float_sums(F (&total)[kX], const uint8_t* group, int vector, const float* x,
                                              const float* sums, int64_t num_blocks) {
#pragma GCC unroll 8
  for (int i = 0; i < kX; ++i) total[i] = Simd::zero();
  for (int64_t b = 0; b < num_blocks; ++b) {
    const GroupBlock block{group + b * kGroupBytes, vector};
    F dot[kX][2];  // one chain would wait for itself
#pragma GCC unroll 8
    for (int i = 0; i < kX; ++i) dot[i][0] = dot[i][1] = Simd::zero();
    block.for_digits([&](int j, F digits) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int i = 0; i < kX; ++i) {
        F& sum = dot[i][j / 16];
        sum = Simd::fma(digits, Simd::broadcast(x[(i * num_blocks + b) * kBlockSize + j]), sum);
      }
    });
    const F scales = block.scales(), minimums = block.minimums();
#pragma GCC unroll 8
    for (int i = 0; i < kX; ++i) {
      total[i] = Simd::fma(Simd::add(dot[i][0], dot[i][1]), scales, total[i]);
      total[i] = Simd::fma(minimums, Simd::broadcast(sums[i * num_blocks + b]), total[i]);
    }
  }
}

// False if x is to be quantised first, or not finite, or so high that sums of it are not.
template <class T>
bool multiply_group_floats(const QuantizedLinear& args, const float* x, const Executor& executor) {
  if (args.quantized_activations || magnitude_of(x, args.rows * args.in_features) > kSummable) return false;
  const int64_t num_blocks = args.in_features / kBlockSize;
  Scratch sums(args.rows * num_blocks);
  for (int64_t b = 0; b < args.rows * num_blocks; ++b) {
    sums.data()[b] = sum_of(
        kBlockSize, [&](F acc, int64_t i, auto count) { return Simd::add(acc, load(x + b * kBlockSize + i, count)); });
  }
  parallel_for(
      executor, args.out_features, static_cast<double>(num_blocks) * (0.6 + 0.6 * static_cast<double>(args.rows)),
      [&](int64_t begin, int64_t end) {
        for_groups(args, begin, end, [&](const uint8_t* group, int64_t o) {
          for_few_rows(args.rows, [&](auto count, int64_t r) {
            constexpr int kX = decltype(count)::value;
            for (int v = 0; v < kGroupVectors; ++v) {
              F total[kX];
              float_sums(total, group, v, x + r * args.in_features, sums.data() + r * num_blocks, num_blocks);
              T* out = static_cast<T*>(args.out) + r * args.out_features + o + v * kLanes;
              for (int i = 0; i < kX; ++i) Simd::store(out + i * args.out_features, total[i]);
            }
          });
        });
      },
      kGroupRows);
  return true;
}

}  // namespace
}  // namespace eqxcallback::cpu
