// Few rows of x times quantised weights in f32: each block is decoded into registers and multiplied there. A Q4_1
// weight is d q + m: a block adds d (sum of q x) + m (sum of x), and the sums of x serve all rows of the weights.
#pragma once

#include "cpu/kernels/linear_activations.h"
#include "cpu/kernels/linear_block_decode.h"

namespace eqxcallback::cpu {
namespace {

// Computes out[i, r]: row i of kX rows of x, times row r of the weights, whose rows are `stride` bytes apart. `sums`
// has a vector {0, sum of x, 0, ...} for each block. Each block is decoded once for all rows of x, and the result of a
// row of x does not depend on other rows.
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
      constexpr int kHalves = encoding == Encoding::kPlainHalves ? 2 : 1,
                    kSize = static_cast<int>(kBlockSize) / kHalves;
      F dot[kX][kHalves];
#pragma GCC unroll 8
      for (int i = 0; i < kX; ++i) {
        for (int h = 0; h < kHalves; ++h) dot[i][h] = Simd::zero();
      }
      for_block_vectors<encoding>(block, [&](int j, F weights) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int i = 0; i < kX; ++i) {
          F& sum = dot[i][j / kSize];
          sum = Simd::fma(weights, Simd::load(x + (i * num_blocks + b) * kBlockSize + j), sum);
        }
      });
#pragma GCC unroll 8
      for (int i = 0; i < kX; ++i) {
        const float* sum = sums + kLanes * (i * num_blocks + b);
        if constexpr (is_plain(encoding)) {
          const auto& head = *reinterpret_cast<const PlainBlock*>(block);
          for (int h = 0; h < kHalves; ++h) {
            total[i][r] = Simd::fma(dot[i][h], Simd::broadcast(head.scale[h]), total[i][r]);
          }
          if constexpr (kHalves == 1) {
            total[i][r] = Simd::fma(Simd::broadcast(head.minimum), Simd::load(sum), total[i][r]);
          }
        } else if constexpr (encoding == Encoding::kQ4_1) {
          total[i][r] = Simd::fma(dot[i][0], Simd::scale_and_minimum(block, sum, minimums[i][r]), total[i][r]);
        } else {
          total[i][r] = Simd::fma(dot[i][0], Simd::broadcast(Simd::half(block)), total[i][r]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kX; ++i) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) out[i * kRows + r] = Simd::sum(total[i][r]) + Simd::total(minimums[i][r]);
  }
}

// Multiplies with the rows of weights from `begin` to `end`, which are at `blocks`.
template <Encoding encoding, class T>
void multiply_dots(const QuantizedLinear& args, const uint8_t* blocks, const float* x, const float* sums, int64_t begin,
                   int64_t end) {
  constexpr int kRows = 4;
  const int64_t num_blocks = args.in_features / kBlockSize, stride = num_blocks * block_bytes(encoding);
  const int64_t part = (end - begin) / kRows;  // long streams, see few_rows.h
  const auto multiply = [&](auto num_x, auto num_w, int64_t first, int64_t o) {
    constexpr int kX = decltype(num_x)::value, kWeights = decltype(num_w)::value;
    float result[kX * kWeights];
    dot_rows<encoding, kX, kWeights>(result, blocks + (o - begin) * stride, part * stride, x + first * args.in_features,
                                     sums + kLanes * first * num_blocks, num_blocks);
    T* out = static_cast<T*>(args.out) + first * args.out_features + o;
    for (int i = 0; i < kX; ++i) {
      for (int r = 0; r < kWeights; ++r) from_float(result[i * kWeights + r], out[i * args.out_features + r * part]);
    }
  };
  const auto columns = [&](auto weights, int64_t o) {
    for_few_rows(args.rows, [&](auto count, int64_t first) {
      constexpr int kX = decltype(count)::value, kWeights = decltype(weights)::value;
      // As many rows of weights as have their sums in registers.
      constexpr int kAtOnce = kX == 1 ? kWeights : smaller(kWeights, kManyRegisters ? 2 : 1);
      for (int r = 0; r < kWeights; r += kAtOnce) multiply(count, Int<kAtOnce>{}, first, o + r * part);
    });
  };
  for (int64_t o = begin; o < begin + part; ++o) columns(Int<kRows>{}, o);
  for (int64_t o = begin + kRows * part; o < end; ++o) columns(Int<1>{}, o);
}

// Returns false if x should first be quantised, or is not finite, or so high that sums of it are not.
template <Encoding encoding, class T>
bool multiply_vectors(const QuantizedLinear& args, const float* x, const Executor& executor) {
  if (args.quantized_activations || magnitude_of(x, args.rows * args.in_features) > kSummable) return false;
  const int64_t num_blocks = args.in_features / kBlockSize;
  Scratch sums(kLanes * args.rows * num_blocks);
  for (int64_t b = 0; b < args.rows * num_blocks; ++b) {
    F sum = Simd::zero();
    for (int i = 0; i < kBlockSize; i += kLanes) sum = Simd::add(sum, Simd::load(x + b * kBlockSize + i));
    Simd::store(sums.data() + kLanes * b, Simd::zero());
    sums.data()[kLanes * b + 1] = Simd::sum(sum);
  }
  const double nanoseconds = static_cast<double>(num_blocks) * (1.2 + 0.8 * static_cast<double>(args.rows));
  parallel_for(
      executor, args.out_features, nanoseconds,
      [&](int64_t begin, int64_t end) {
        for_unpacked_rows<encoding>(args.blocks, args.in_features, begin, end,
                                    [&](const uint8_t* blocks, int64_t first, int64_t last) {
                                      multiply_dots<unpacked(encoding), T>(args, blocks, x, sums.data(), first, last);
                                    });
      },
      8);
  return true;
}

}  // namespace
}  // namespace eqxcallback::cpu
