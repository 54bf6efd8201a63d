// Linear layers over GGUF blocks. Sums are f32, whatever the weights are stored in.
//
// One row of x: each block is decoded into registers and multiplied there; memory is read once. Since a Q4_1 weight is
// d q + m, a block adds d (sum of q x) + m (sum of x), and the sums of x serve all rows of the weights. AVX-512 VNNI
// multiplies bytes instead, see byte_dots.h.
// Several rows: a few rows of the weights at a time are decoded into cache, and multiplied with all rows of x.
#pragma once

#include "cpu/kernels/common.h"
#ifdef __AVX512VNNI__
#include "cpu/kernels/byte_dots.h"
#endif

namespace eqxcallback::cpu {
namespace {

// Decodes one block: kBlockSize floats, without the scale and minimum of Q4_1.
template <Encoding encoding, class Body>
void for_block_vectors(const uint8_t* block, const Body& body) {
  if constexpr (encoding == Encoding::kQ4_1) {
    for (int i = 0; i < kBlockSize / 2; i += kLanes) {
      body(i, Simd::low_nibbles(block + 4 + i));
      body(kBlockSize / 2 + i, Simd::high_nibbles(block + 4 + i));
    }
  } else {
    for (int i = 0; i < kBlockSize; i += kLanes) body(i, Simd::int8s(block + 2 + i));
  }
}

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
      // Rows are short, and four are read at once: too many streams for the processor to see what comes next.
      __builtin_prefetch(block + kRows * stride);
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

template <Encoding encoding, class T>
void multiply_vector(const QuantizedLinear& args, const float* x, const Executor& executor) {
  const int64_t num_blocks = args.in_features / kBlockSize, stride = num_blocks * block_bytes(encoding);
#ifdef __AVX512VNNI__
  Scratch bytes(num_blocks * static_cast<int64_t>(sizeof(ByteBlock) / sizeof(float)));
  auto* byte_blocks = reinterpret_cast<ByteBlock*>(bytes.data());
  if (to_bytes(byte_blocks, x, num_blocks)) {
    parallel_for(
        executor, args.out_features, static_cast<double>(num_blocks) * (encoding == Encoding::kQ4_1 ? 1.3 : 1.5),
        [&](int64_t begin, int64_t end) {
          multiply_bytes<encoding>(static_cast<T*>(args.out), args.blocks, stride, byte_blocks, num_blocks, begin, end);
        },
        kByteRows * kByteGroups);
    return;
  }
#endif
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
        int64_t o = begin;
        for (; o + kRows <= end; o += kRows) {
          dot_rows<encoding, kRows>(result, args.blocks + o * stride, stride, x, sums.data(), num_blocks);
          for (int r = 0; r < kRows; ++r) from_float(result[r], out[o + r]);
        }
        for (; o < end; ++o) {
          dot_rows<encoding, 1>(result, args.blocks + o * stride, stride, x, sums.data(), num_blocks);
          from_float(result[0], out[o]);
        }
      },
      kRows);
}

template <Encoding encoding>
void decode_row(float* out, const uint8_t* blocks, int64_t num_blocks) {
  constexpr float kOne[2] = {0, 1};
  for (int64_t b = 0; b < num_blocks; ++b, blocks += block_bytes(encoding), out += kBlockSize) {
    F scale, minimum = Simd::zero();
    if constexpr (encoding == Encoding::kQ4_1) {
      Simd::Minimums minimums = Simd::no_minimums();
      scale = Simd::scale_and_minimum(blocks, kOne, minimums);
      minimum = Simd::broadcast(Simd::total(minimums));
    } else {
      scale = Simd::broadcast(Simd::half(blocks));
    }
    for_block_vectors<encoding>(blocks,
                                [&](int i, F weights) { Simd::store(out + i, Simd::fma(weights, scale, minimum)); });
  }
}

// A tile of the product: kDotRows rows of x with kDotColumns rows of decoded weights.
template <class T>
void dot_tile(T* out, int64_t out_stride, const float* x, const float* weights, int64_t in_features, int rows,
              int columns) {
  constexpr int kRows = Simd::kDotRows, kColumns = Simd::kDotColumns;
  static_assert(kRows * kColumns == kLanes);
  F acc[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) acc[i] = Simd::zero();
  for (int64_t i = 0; i < in_features; i += kLanes) {
    F w[kColumns];
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; ++c) w[c] = Simd::load(weights + c * in_features + i);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const F v = Simd::load(x + smaller(r, rows - 1) * in_features + i);
#pragma GCC unroll 16
      for (int c = 0; c < kColumns; ++c) acc[r * kColumns + c] = Simd::fma(v, w[c], acc[r * kColumns + c]);
    }
  }
  float result[kLanes];
  Simd::store(result, Simd::sums(acc));
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < columns; ++c) from_float(result[r * kColumns + c], out[r * out_stride + c]);
  }
}

template <Encoding encoding, class T>
void multiply_matrix(const QuantizedLinear& args, const float* x, const Executor& executor) {
  constexpr int kRows = Simd::kDotRows, kColumns = Simd::kDotColumns;
  constexpr int kDecoded = 3 * kColumns;  // decoded at a time: they stay in the first cache with kRows of x
  const int64_t size = args.in_features, num_blocks = size / kBlockSize, stride = num_blocks * block_bytes(encoding);
  const double nanoseconds = static_cast<double>(args.rows * size) / (4 * kLanes) + static_cast<double>(num_blocks) * 2;
  parallel_for(
      executor, args.out_features, nanoseconds,
      [&](int64_t begin, int64_t end) {
        Scratch weights(kDecoded * size);
        for (int64_t o = begin; o < end; o += kDecoded) {
          const int decoded = static_cast<int>(smaller<int64_t>(kDecoded, end - o));
          for (int c = 0; c < decoded; ++c) {
            decode_row<encoding>(weights.data() + c * size, args.blocks + (o + c) * stride, num_blocks);
          }
          // The last tile may be narrower than its columns: those are computed from what is there, and dropped.
          for (int c = decoded; c < kDecoded; ++c) {
            std::memset(weights.data() + c * size, 0, static_cast<size_t>(size) * sizeof(float));
          }
          for (int64_t r = 0; r < args.rows; r += kRows) {
            const int rows = static_cast<int>(smaller<int64_t>(kRows, args.rows - r));
            for (int c = 0; c < decoded; c += kColumns) {
              dot_tile(static_cast<T*>(args.out) + r * args.out_features + o + c, args.out_features, x + r * size,
                       weights.data() + c * size, size, rows, smaller(kColumns, decoded - c));
            }
          }
        }
      },
      kDecoded);
}

template <Encoding encoding, class T>
void quantized_linear_as(const QuantizedLinear& args, const float* x, const Executor& executor) {
  if (args.rows == 1) {
    multiply_vector<encoding, T>(args, x, executor);
  } else {
    multiply_matrix<encoding, T>(args, x, executor);
  }
}

void quantized_linear(Element element, const QuantizedLinear& args, const Executor& executor) {
  with_type(element, [&](auto* type) {
    using T = Pointee<decltype(type)>;
    const auto run = [&](const float* x) {
      if (args.encoding == Encoding::kQ4_1) {
        quantized_linear_as<Encoding::kQ4_1, T>(args, x, executor);
      } else {
        quantized_linear_as<Encoding::kQ8_0, T>(args, x, executor);
      }
    };
    if constexpr (std::is_same_v<T, float>) {
      run(static_cast<const float*>(args.x));
    } else {
      const int64_t size = args.rows * args.in_features;
      Scratch x(size);
      for_vectors(size, [&](int64_t i, auto count) {
        store(x.data() + i, load(static_cast<const T*>(args.x) + i, count), count);
      });
      run(x.data());
    }
  });
}

}  // namespace
}  // namespace eqxcallback::cpu
