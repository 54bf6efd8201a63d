// One row of x times quantised weights in f32: each block is decoded into registers and multiplied there. A Q4_1 weight
// is d q + m: a block adds d (sum of q x) + m (sum of x), and the sums of x serve all rows of the weights.
#pragma once

#include "cpu/kernels/linear_activations.h"
#include "cpu/kernels/linear_block_decode.h"

namespace eqxcallback::cpu {
namespace {

// The dot products of kRows rows of weights, `stride` bytes apart, with x. `sums` has {0, sum of x} for each block.
template <Encoding encoding, int kRows>
void dot_rows(float* out, const uint8_t* blocks, int64_t stride, const float* x, const float* sums,
              int64_t num_blocks) {
  F total[kRows];
  Simd::Minimums minimums[kRows];
  for (int r = 0; r < kRows; ++r) total[r] = Simd::zero(), minimums[r] = Simd::no_minimums();
  for (int64_t b = 0; b < num_blocks; ++b) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const uint8_t* block = blocks + r * stride + b * block_bytes(encoding);
      F dot = Simd::zero();
      for_block_vectors<encoding>(
          block, [&](int i, F weights) { dot = Simd::fma(weights, Simd::load(x + b * kBlockSize + i), dot); });
      F scale;
      if constexpr (encoding == Encoding::kQ4_1) {
        scale = Simd::scale_and_minimum(block, sums + 2 * b, minimums[r]);
      } else {
        scale = Simd::broadcast(Simd::half(block));
      }
      total[r] = Simd::fma(dot, scale, total[r]);
    }
  }
  for (int r = 0; r < kRows; ++r) out[r] = Simd::sum(total[r]) + Simd::total(minimums[r]);
}

// False if x is to be quantised first, or not finite, or so high that sums of it are not.
template <Encoding encoding, class T>
bool multiply_vector(const QuantizedLinear& args, const float* x, const Executor& executor) {
  if (args.quantized_activations || magnitude_of(x, args.in_features) > kSummable) return false;
  const int64_t num_blocks = args.in_features / kBlockSize, stride = num_blocks * block_bytes(encoding);
  Scratch sums(2 * num_blocks);
  for (int64_t b = 0; b < num_blocks; ++b) {
    F sum = Simd::zero();
    for (int i = 0; i < kBlockSize; i += kLanes) sum = Simd::add(sum, Simd::load(x + b * kBlockSize + i));
    sums.data()[2 * b] = 0;
    sums.data()[2 * b + 1] = Simd::sum(sum);
  }
  constexpr int kRows = 4;
  const double nanoseconds = static_cast<double>(num_blocks) * (encoding == Encoding::kQ4_1 ? 1.8 : 2.0);
  parallel_for(
      executor, args.out_features, nanoseconds,
      [&](int64_t begin, int64_t end) {
        float result[kRows];
        T* out = static_cast<T*>(args.out);
        // Long streams, see dots.h.
        const int64_t part = (end - begin) / kRows;
        for (int64_t o = begin; o < begin + part; ++o) {
          dot_rows<encoding, kRows>(result, args.blocks + o * stride, part * stride, x, sums.data(), num_blocks);
          for (int r = 0; r < kRows; ++r) from_float(result[r], out[o + r * part]);
        }
        for (int64_t o = begin + kRows * part; o < end; ++o) {
          dot_rows<encoding, 1>(result, args.blocks + o * stride, stride, x, sums.data(), num_blocks);
          from_float(result[0], out[o]);
        }
      },
      kRows);
  return true;
}

}  // namespace
}  // namespace eqxcallback::cpu
