// Few rows of x times quantised weights in f32: each block is decoded into registers and multiplied there. A Q4_1
// weight is d q + m: a block adds d (sum of q x) + m (sum of x), and the sums of x serve all rows of the weights.
#pragma once

#include "cpu/kernels/linear_activations.h"
#include "cpu/kernels/linear_block_decode.h"

namespace eqxcallback::cpu {
namespace {

// out[i, r]: row i of x, of kX, times row r of weights, `stride` bytes apart. `sums` has {0, sum of x} for each block.
// Each block is decoded once for all rows of x, and what a row of x gets does not depend on the others.
template <Encoding encoding, int kX, int kRows>
[[gnu::noinline]] void dot_rows(float* out, const uint8_t* blocks, int64_t stride, const float* x, const float* sums,
                                int64_t num_blocks) {
  F total[kX][kRows];
  Simd::Minimums minimums[kX][kRows];
#pragma GCC unroll 8
  for (int i = 0; i < kX; ++i) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) total[i][r] = Simd::zero(), minimums[i][r] = Simd::no_minimums();
  }
  for (int64_t b = 0; b < num_blocks; ++b) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const uint8_t* block = blocks + r * stride + b * block_bytes(encoding);
      F dot[kX];
#pragma GCC unroll 8
      for (int i = 0; i < kX; ++i) dot[i] = Simd::zero();
      for_block_vectors<encoding>(block, [&](int j, F weights) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int i = 0; i < kX; ++i) {
          dot[i] = Simd::fma(weights, Simd::load(x + (i * num_blocks + b) * kBlockSize + j), dot[i]);
        }
      });
#pragma GCC unroll 8
      for (int i = 0; i < kX; ++i) {
        F scale;
        if constexpr (encoding == Encoding::kQ4_1) {
          scale = Simd::scale_and_minimum(block, sums + 2 * (i * num_blocks + b), minimums[i][r]);
        } else {
          scale = Simd::broadcast(Simd::half(block));
        }
        total[i][r] = Simd::fma(dot[i], scale, total[i][r]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kX; ++i) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) out[i * kRows + r] = Simd::sum(total[i][r]) + Simd::total(minimums[i][r]);
  }
}

// False if x is to be quantised first, or not finite, or so high that sums of it are not.
template <Encoding encoding, class T>
bool multiply_vectors(const QuantizedLinear& args, const float* x, const Executor& executor) {
  if (args.quantized_activations || magnitude_of(x, args.rows * args.in_features) > kSummable) return false;
  const int64_t num_blocks = args.in_features / kBlockSize, stride = num_blocks * block_bytes(encoding);
  Scratch sums(2 * args.rows * num_blocks);
  for (int64_t b = 0; b < args.rows * num_blocks; ++b) {
    F sum = Simd::zero();
    for (int i = 0; i < kBlockSize; i += kLanes) sum = Simd::add(sum, Simd::load(x + b * kBlockSize + i));
    sums.data()[2 * b] = 0;
    sums.data()[2 * b + 1] = Simd::sum(sum);
  }
  constexpr int kRows = 4;
  const double nanoseconds = static_cast<double>(num_blocks) * (1.2 + 0.8 * static_cast<double>(args.rows));
  parallel_for(
      executor, args.out_features, nanoseconds,
      [&](int64_t begin, int64_t end) {
        // Long streams, see dots.h.
        const int64_t part = (end - begin) / kRows;
        const auto multiply = [&](auto num_x, auto num_w, int64_t first, int64_t o) {
          constexpr int kX = decltype(num_x)::value, kWeights = decltype(num_w)::value;
          float result[kX * kWeights];
          dot_rows<encoding, kX, kWeights>(result, args.blocks + o * stride, part * stride,
                                           x + first * args.in_features, sums.data() + 2 * first * num_blocks,
                                           num_blocks);
          T* out = static_cast<T*>(args.out) + first * args.out_features + o;
          for (int i = 0; i < kX; ++i) {
            for (int r = 0; r < kWeights; ++r) {
              from_float(result[i * kWeights + r], out[i * args.out_features + r * part]);
            }
          }
        };
        const auto columns = [&](auto weights, int64_t o) {
          for_few_rows(args.rows, [&](auto count, int64_t first) {
            constexpr int kX = decltype(count)::value, kWeights = decltype(weights)::value;
            // So many rows of weights that the sums stay in registers.
            constexpr int kAtOnce = kX == 1 ? kWeights : smaller(kWeights, kManyRegisters ? 2 : 1);
            for (int r = 0; r < kWeights; r += kAtOnce) multiply(count, Int<kAtOnce>{}, first, o + r * part);
          });
        };
        for (int64_t o = begin; o < begin + part; ++o) columns(Int<kRows>{}, o);
        for (int64_t o = begin + kRows * part; o < end; ++o) columns(Int<1>{}, o);
      },
      kRows);
  return true;
}

}  // namespace
}  // namespace eqxcallback::cpu
