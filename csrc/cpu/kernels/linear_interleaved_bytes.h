// Rows of x as digits, see linear_byte_dots.h, times Q4_1 blocks of 16 rows side by side. Four neighbouring weights of
// a row are a lane, which a dword of x meets: the products of bytes are all that is left to do. Many rows are
// multiplied so as well, as f32 takes as many instructions; each gets what it gets alone.
#pragma once

#include "cpu/kernels/linear_byte_dots.h"
#include "cpu/kernels/linear_interleaved.h"

namespace eqxcallback::cpu {
namespace {

// So many bytes ahead are fetched: a group is one stream, which the processor follows no further than a page.
inline constexpr int64_t kGroupAhead = 8192;

// kX rows of x, as digits, times the rows of one vector.
template <int kDigits, int kX>
[[gnu::always_inline]] inline void digit_sums(F (&total)[kX], const uint8_t* group, int vector, const ByteBlock* x,
                                              int64_t num_blocks) {
#pragma GCC unroll 8
  for (int i = 0; i < kX; ++i) total[i] = Simd::zero();
  for (int64_t b = 0; b < num_blocks; ++b) {
    const GroupBlock block{group + b * kGroupBytes, vector};
    if constexpr (kX == 1) {
      if (vector == 0) prefetch(block.block + kGroupAhead, kGroupBytes);
    }
    Ints sums[kX][kDigits] = {};
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const Ints both = block.fours(j);
      constexpr int32_t kNibbles = 0x0f0f0f0f;
      const Ints first = both & kNibbles, second = (both >> 4) & kNibbles;
#pragma GCC unroll 8
      for (int i = 0; i < kX; ++i) {
        const ByteBlock& of_x = x[i * num_blocks + b];
        const auto add = [&](Ints& sum, const int8_t* digits) __attribute__((always_inline)) {
          const auto* fours = reinterpret_cast<const ByteFour*>(digits) + j;
          sum = Simd::fma(factor_of(fours), first, sum);
          sum = Simd::fma(factor_of(fours + 4), second, sum);
        };
        add(sums[i][0], of_x.low);
        if constexpr (kDigits == 3) {
          add(sums[i][1], of_x.middle);
          add(sums[i][2], of_x.high);
        }
      }
    }
    const F scales = block.scales(), minimums = block.minimums();
#pragma GCC unroll 8
    for (int i = 0; i < kX; ++i) {
      const ByteBlock& of_x = x[i * num_blocks + b];
      Ints sum = sums[i][0];
      // 32 integers of 23 bits times 15 at most have room in 32 bits.
      if constexpr (kDigits == 3) sum += 256 * (sums[i][1] + 256 * sums[i][2]);
      const F dot = Simd::mul(__builtin_convertvector(sum, F), Simd::broadcast(of_x.lower_scale));
      total[i] = Simd::fma(dot, scales, total[i]);
      total[i] = Simd::fma(minimums, Simd::broadcast(of_x.sums[1]), total[i]);
    }
  }
}

// False if x has no form in bytes.
template <int kDigits, class T>
bool multiply_group_digits(const QuantizedLinear& args, const float* x, const Executor& executor) {
  constexpr int kRows = 6;  // more sums do not fit into registers
  const int64_t num_blocks = args.in_features / kBlockSize;
  const int64_t row_bytes = num_blocks * static_cast<int64_t>(sizeof(ByteBlock));
  // So many rows of x at a time that they stay in the second cache.
  const int64_t step = smaller(args.rows, larger<int64_t>(kRows, (int64_t{1} << 19) / larger<int64_t>(1, row_bytes)));
  const int64_t floats = row_bytes / static_cast<int64_t>(sizeof(float));
  Scratch scratch(step * (floats + 1));
  auto* blocks = reinterpret_cast<ByteBlock*>(scratch.data());
  float* has_form = scratch.data() + step * floats;
  for (int64_t first = 0; first < args.rows; first += step) {
    const int64_t num_rows = smaller(step, args.rows - first);
    parallel_for(executor, num_rows, static_cast<double>(num_blocks) * 20, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        has_form[r] = to_bytes<kDigits>(blocks + r * num_blocks, x + (first + r) * args.in_features, num_blocks);
      }
    });
    for (int64_t r = 0; r < num_rows; ++r) {
      if (has_form[r] == 0) return false;
    }
    // A row alone is about as fast as its weights come from memory.
    const double of_rows = (kDigits == 3 ? 0.22 : 0.1) * static_cast<double>(num_rows);
    parallel_for(
        executor, args.out_features, static_cast<double>(num_blocks) * (0.6 + of_rows),
        [&](int64_t begin, int64_t end) {
          for_few_rows<kRows>(num_rows, [&](auto count, int64_t r) {
            constexpr int kX = decltype(count)::value;
            for_groups(args, begin, end, [&](const uint8_t* group, int64_t o) {
              for (int v = 0; v < kGroupVectors; ++v) {
                F total[kX];
                digit_sums<kDigits>(total, group, v, blocks + r * num_blocks, num_blocks);
                T* out = static_cast<T*>(args.out) + (first + r) * args.out_features + o + v * kLanes;
#pragma GCC unroll 8
                for (int i = 0; i < kX; ++i) Simd::store(out + i * args.out_features, total[i]);
              }
            });
          });
        },
        kGroupRows);
  }
  return true;
}

}  // namespace
}  // namespace eqxcallback::cpu
