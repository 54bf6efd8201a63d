// Linear layers over GGUF blocks. Sums are f32, whatever the weights are stored in.
//
// Few rows of x read each weight once and have to be fast at decoding: linear_float_dots.h, or linear_byte_dots.h if
// the processor multiplies bytes, and linear_decoded_tiles.h. For many rows of x, a few rows of weights at a time
// are put into cache and multiplied with all of x: as bytes, linear_side_by_side.h, or decoded to f32.
// Rows of weights that are side by side have kernels of their own: linear_interleaved.h.
#pragma once

#include "cpu/kernels/linear_activations.h"
#include "cpu/kernels/linear_block_decode.h"
#include "cpu/kernels/linear_decoded_tiles.h"
#include "cpu/kernels/linear_interleaved.h"
#ifdef EQXCALLBACK_BYTES
#include "cpu/kernels/linear_byte_dots.h"
#include "cpu/kernels/linear_side_by_side.h"
#else
#include "cpu/kernels/linear_float_dots.h"
#include "cpu/kernels/linear_interleaved_floats.h"
#endif

namespace eqxcallback::cpu {
namespace {

// Up to kRowsAsAlone rows are each multiplied as a row alone is, with the same result bit by bit, and up to
// kRowsOfTiles rows by tiles. Measured: see docs/design/native.md.
#ifdef EQXCALLBACK_BYTES
inline constexpr int64_t kRowsAsAlone = Bytes::kRows == 1 ? 8 : 3, kQuantizedRowsAsAlone = 4;
inline constexpr bool kHasBytes = true;
#else
inline constexpr int64_t kRowsAsAlone = 8, kQuantizedRowsAsAlone = 1;
inline constexpr bool kHasBytes = false;
#endif
inline constexpr int64_t kRowsOfTiles = kLanes == 16 ? 6 : 0;
constexpr int64_t rows_as_alone(Encoding encoding, bool quantized_activations) {
  if (is_interleaved(encoding) && kHasBytes) return INT64_MAX;
  return quantized_activations ? kQuantizedRowsAsAlone : kRowsAsAlone;
}

// Computes a tile of the product: kDotRows rows of x with kDotColumns rows of decoded weights.
template <class T, class Scale>
void dot_tile(T* out, int64_t out_stride, const float* x, const float* weights, int64_t in_features, int rows,
              int columns, const Scale& scale) {
  constexpr int kRows = Simd::kDotRows, kColumns = Simd::kDotColumns;
  constexpr int kSums = kRows * kColumns;
  static_assert(kSums % kLanes == 0);
  F acc[kSums];
#pragma GCC unroll 16
  for (int i = 0; i < kSums; ++i) acc[i] = Simd::zero();
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
  float result[kSums];
#pragma GCC unroll 16
  for (int i = 0; i < kSums; i += kLanes) Simd::store(result + i, Simd::sums(acc + i));
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < columns; ++c) from_float(result[r * kColumns + c] * scale(c), out[r * out_stride + c]);
  }
}

// Computes out = x W^T with rows of `size` elements, a multiple of kLanes. decode(row, o) writes row o of W without its
// scale(o), in about `decode_nanoseconds`.
template <class T, class Decode, class Scale>
void multiply_decoded(T* out, const float* x, int64_t num_rows, int64_t out_features, int64_t size,
                      double decode_nanoseconds, const Executor& executor, const Decode& decode, const Scale& scale) {
  constexpr int kRows = Simd::kDotRows, kColumns = Simd::kDotColumns;
  constexpr int kDecoded = 3 * kColumns;  // rows decoded at a time: they stay in the first cache with kRows of x
  const double nanoseconds = static_cast<double>(num_rows * size) / (4 * kLanes) + decode_nanoseconds;
  parallel_for(
      executor, out_features, nanoseconds,
      [&](int64_t begin, int64_t end) {
        Scratch weights(kDecoded * size);
        for (int64_t o = begin; o < end; o += kDecoded) {
          const int decoded = static_cast<int>(smaller<int64_t>(kDecoded, end - o));
          for (int c = 0; c < decoded; ++c) decode(weights.data() + c * size, o + c);
          // The last tile may be narrower: its other columns are computed from whatever is in memory, and dropped.
          for (int c = decoded; c < kDecoded; ++c) {
            std::memset(weights.data() + c * size, 0, static_cast<size_t>(size) * sizeof(float));
          }
          for (int64_t r = 0; r < num_rows; r += kRows) {
            const int rows = static_cast<int>(smaller<int64_t>(kRows, num_rows - r));
            for (int c = 0; c < decoded; c += kColumns) {
              dot_tile(out + r * out_features + o + c, out_features, x + r * size, weights.data() + c * size, size,
                       rows, smaller(kColumns, decoded - c), [&](int i) { return scale(o + c + i); });
            }
          }
        }
      },
      kDecoded);
}

// False if x has no form in which few rows are fast.
template <Encoding encoding, class T>
bool multiply_few(const QuantizedLinear& args, const float* x, const Executor& executor) {
  if constexpr (!is_interleaved(encoding)) {
    return multiply_vectors<encoding, T>(args, x, executor);
  } else {
#ifdef EQXCALLBACK_BYTES
    return args.quantized_activations ? multiply_groups<encoding, 1, T>(args, x, executor)
                                      : multiply_groups<encoding, 3, T>(args, x, executor);
#else
    return multiply_group_floats<encoding, T>(args, x, executor);
#endif
  }
}

template <Encoding encoding, class T>
void multiply_matrix(const QuantizedLinear& args, const float* x, const Executor& executor) {
  if constexpr (is_interleaved(encoding)) {
    multiply_group_panels<encoding, T>(args, x, executor);
  } else {
    const int64_t num_blocks = args.in_features / kBlockSize;
    const int64_t stride = args.in_features / weights_of_block(encoding) * block_bytes(encoding);
    multiply_decoded(
        static_cast<T*>(args.out), x, args.rows, args.out_features, args.in_features,
        static_cast<double>(num_blocks) * 2, executor,
        [&](float* row, int64_t o) { decode_row<encoding>(row, args.blocks + o * stride, args.in_features); },
        [](int64_t) { return 1.0f; });
  }
}

template <Encoding encoding, class T>
void quantized_linear_as(const QuantizedLinear& args, const float* x, const Executor& executor) {
  const auto alone = [&](int64_t r) {
    QuantizedLinear row = args;
    row.rows = 1;
    row.out = static_cast<T*>(args.out) + r * args.out_features;
    quantized_linear_as<encoding, T>(row, x + r * args.in_features, executor);
  };
  const auto apart = [&](const auto& multiply) {
    return multiply_apart(x, args.rows, args.in_features, kSummable, multiply, alone);
  };
  if (args.rows <= rows_as_alone(encoding, args.quantized_activations)) {
    if (apart([&](const float* rows) { return multiply_few<encoding, T>(args, rows, executor); })) return;
    if (args.rows > 1) {
      for (int64_t r = 0; r < args.rows; ++r) alone(r);
      return;
    }
  }
#ifdef EQXCALLBACK_BYTES
  const auto multiply_panels_of = [&](auto digits) {
    return args.rows > 1 && apart([&](const float* rows) {
             return multiply_panels_of_blocks<encoding, decltype(digits)::value, T>(args, rows, executor);
           });
  };
#endif
  if (args.quantized_activations) {
#ifdef EQXCALLBACK_BYTES
    if constexpr (!is_interleaved(encoding)) {
      if (multiply_panels_of(Int<1>{})) return;
    }
#endif
    const int64_t size = args.rows * args.in_features;
    Scratch quantized(size);
    std::memcpy(quantized.data(), x, static_cast<size_t>(size) * sizeof(float));
    quantize_activations(quantized.data(), size, kBlockSize);
    QuantizedLinear call = args;
    call.quantized_activations = false;
    return quantized_linear_as<encoding, T>(call, quantized.data(), executor);
  }
  if constexpr (kRowsOfTiles > 0 && !is_interleaved(encoding)) {
    if (args.rows <= kRowsOfTiles) return multiply_tiles<encoding, T>(args, x, executor);
  }
#ifdef EQXCALLBACK_BYTES
  if constexpr (!is_interleaved(encoding)) {
    if (multiply_panels_of(Int<3>{})) return;
  }
#endif
  multiply_matrix<encoding, T>(args, x, executor);
}

void quantized_linear(Element element, const QuantizedLinear& args, const Executor& executor) {
  with_type(element, [&](auto* type) {
    using T = Pointee<decltype(type)>;
    const auto run = [&](const float* x) {
      switch (args.encoding) {
        case Encoding::kQ4_1:
          return quantized_linear_as<Encoding::kQ4_1, T>(args, x, executor);
        case Encoding::kQ8_0:
          return quantized_linear_as<Encoding::kQ8_0, T>(args, x, executor);
        case Encoding::kQ4_0:
          return quantized_linear_as<Encoding::kQ4_0, T>(args, x, executor);
        case Encoding::kQ5_0:
          return quantized_linear_as<Encoding::kQ5_0, T>(args, x, executor);
        case Encoding::kQ5_1:
          return quantized_linear_as<Encoding::kQ5_1, T>(args, x, executor);
        case Encoding::kQ4_K:
          return quantized_linear_as<Encoding::kQ4_K, T>(args, x, executor);
        case Encoding::kQ5_K:
          return quantized_linear_as<Encoding::kQ5_K, T>(args, x, executor);
        case Encoding::kQ6_K:
          return quantized_linear_as<Encoding::kQ6_K, T>(args, x, executor);
        case Encoding::kQ4_1_R16:
          return quantized_linear_as<Encoding::kQ4_1_R16, T>(args, x, executor);
        case Encoding::kQ8_0_R16:
          return quantized_linear_as<Encoding::kQ8_0_R16, T>(args, x, executor);
        default:
          return;  // no caller has other encodings
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
