// Few rows of x, as digits, times quantised weights, by the products of bytes of the processor.
#pragma once

#include <cstddef>

#include "cpu/kernels/linear_digits.h"

namespace eqxcallback::cpu {
namespace {

inline constexpr int kRowsAtOnce = 8;
inline constexpr int kByteGroups = kRowsAtOnce / Bytes::kRows;  // vectors with 16 bytes of each row

struct alignas(64) ByteBlock {
  int8_t digits[3][kBlockSize];  // from the lowest on
  // Offsets of the digits, see ByteRows::offset: for Q8_0; for each half, if weights are kTooHighPlain too high.
  int32_t upper_offset[4], lower_offset[4], plain_offset[2][4];
  float sums[4];                   // 0, sum of x, 0, 0
  float lower_scale, upper_scale;  // 2^e, 2^(e + 8); or s, 0
};

// Sums of products with n, of the rows in two vectors, which have the halves of a block: 4 sums for each row. A sum is
// one integer if that has room, as for weights of up to 6 bits, or else two parts, 2^8 upper + lower. With one digit
// there are no upper parts.
template <Encoding encoding, int kDigits>
struct ByteDots {
  static constexpr bool kHasUpper = kDigits == 3 && encoding == Encoding::kQ8_0;
  Ints upper, lower;

  ByteDots(Ints first, Ints second, const ByteBlock& x) {
    const auto add = [&](Ints sum, const int8_t* digits) __attribute__((always_inline)) {
      sum = Simd::fma(Bytes::for_all_rows(digits), first, sum);
      return Simd::fma(Bytes::for_all_rows(digits + 16), second, sum);
    };
    Ints digits{};
    if constexpr (kDigits == 3) digits = add(256 * add(Ints{}, x.digits[2]), x.digits[1]);
    if constexpr (kHasUpper) {
      upper = digits;
      lower = add(Ints{}, x.digits[0]);
    } else {
      lower = add(256 * digits, x.digits[0]);
    }
  }
};

// Computes what weights of an encoding meet. Returns false if x has no form in bytes.
template <Encoding encoding, int kDigits>
bool to_bytes(ByteBlock* blocks, const float* x, int64_t num_blocks) {
  for (int64_t b = 0; b < num_blocks; ++b, x += kBlockSize) {
    ByteBlock& block = blocks[b];
    Steps steps;
    if (!digit_steps<kDigits>(steps, x)) return false;
    block.lower_scale = steps.scale;
    block.upper_scale = kDigits == 3 ? 256 * steps.scale : 0;
    F sum = Simd::zero();
    for (int half = 0; half < 2; ++half) split_half<kDigits, 3>(block.digits[0], kBlockSize, x, half, steps, sum);
    const float total = Simd::sum(sum);
    for (int lane = 0; lane < 4; ++lane) block.sums[lane] = lane == 1 ? total : 0;
    if constexpr (encoding == Encoding::kQ8_0) {
      const Ints nothing = Bytes::as_weights(Ints{});
      const ByteDots<Encoding::kQ8_0, 3> sums(nothing, nothing, block);
      for (int lane = 0; lane < 4; ++lane) {
        block.upper_offset[lane] = -sums.upper[lane];
        block.lower_offset[lane] = -sums.lower[lane];
      }
    } else if constexpr (is_plain(encoding)) {
      const Ints high = Ints{} + kTooHighPlain * 0x01010101;
      const ByteDots<Encoding::kPlain, 3> of_first(high, Ints{}, block), of_second(Ints{}, high, block);
      for (int lane = 0; lane < 4; ++lane) {
        block.plain_offset[0][lane] = -of_first.lower[lane];
        block.plain_offset[1][lane] = -of_second.lower[lane];
      }
    }
  }
  return true;
}

// The halves of a block, for the rows of one vector.
template <Encoding encoding>
struct WeightBytes {
  Ints first, second;

  WeightBytes(const uint8_t* const* rows, int64_t offset) {
    if constexpr (encoding == Encoding::kQ4_1) {
      const Ints bytes = Bytes::load_rows(rows, offset + 4);
      constexpr int32_t kNibbles = 0x0f0f0f0f;
      first = bytes & kNibbles, second = (bytes >> 4) & kNibbles;
    } else if constexpr (is_plain(encoding)) {
      first = Bytes::load_rows(rows, offset), second = Bytes::load_rows(rows, offset + 16);
    } else {
      first = Bytes::as_weights(Bytes::load_rows(rows, offset + 2));
      second = Bytes::as_weights(Bytes::load_rows(rows, offset + 18));
    }
  }
};

// Computes the sums over the blocks of one row of x and the rows of weights of one vector, in 4 lanes each, and the
// sums of the minimums.
template <Encoding encoding, int kDigits>
struct RowSums {
  F total = Simd::zero();
  Bytes::Minimums minimums = Bytes::no_minimums();

  void add(const WeightBytes<encoding>& weights, const uint8_t* const* rows, int64_t offset, const ByteBlock& x) {
    if constexpr (is_plain(encoding)) return add_plain(weights, rows, offset, x);
    using Dots = ByteDots<encoding, kDigits>;
    Dots dots(weights.first, weights.second, x);
    F scale;
    if constexpr (encoding == Encoding::kQ4_1) {
      scale = Bytes::scales_and_minimums(rows, offset, x.sums, minimums);
    } else {
      if constexpr (Dots::kHasUpper) dots.upper += Bytes::for_all_rows(x.upper_offset);
      dots.lower += Bytes::for_all_rows(x.lower_offset);
      scale = Bytes::scales(rows, offset);
    }
    F dot = Simd::mul(__builtin_convertvector(dots.lower, F), Simd::broadcast(x.lower_scale));
    if constexpr (Dots::kHasUpper) {
      dot = Simd::fma(__builtin_convertvector(dots.upper, F), Simd::broadcast(x.upper_scale), dot);
    }
    total = Simd::fma(dot, scale, total);
  }

  void add_plain(const WeightBytes<encoding>& weights, const uint8_t* const* rows, int64_t offset, const ByteBlock& x) {
    const F step = Simd::broadcast(x.lower_scale);
    const auto scaled = [&](Ints first, Ints second, Ints too_high, int64_t at) __attribute__((always_inline)) {
      const ByteDots<encoding, kDigits> dots(first, second, x);
      const F dot = Simd::mul(__builtin_convertvector(dots.lower + too_high, F), step);
      total = Simd::fma(dot, Bytes::floats(rows, offset + at), total);
    };
    const Ints first = Bytes::for_all_rows(x.plain_offset[0]), second = Bytes::for_all_rows(x.plain_offset[1]);
    constexpr int64_t kScale = offsetof(PlainBlock, scale);
    if constexpr (encoding == Encoding::kPlainHalves) {
      scaled(weights.first, Ints{}, first, kScale);
      scaled(Ints{}, weights.second, second, kScale + 4);
    } else {
      scaled(weights.first, weights.second, first + second, kScale);
      const F minimums = Bytes::floats(rows, offset + static_cast<int64_t>(offsetof(PlainBlock, minimum)));
      total = Simd::fma(minimums, reinterpret_cast<F>(Bytes::for_all_rows(x.sums)), total);
    }
  }

  void store(float* out) const {
    float lanes[kLanes];
    Simd::store(lanes, total);
    for (int r = 0; r < Bytes::kRows; ++r) {
      const float* lane = lanes + 4 * r;
      out[r] = (lane[0] + lane[1]) + (lane[2] + lane[3]) + Bytes::total(minimums, r);
    }
  }
};

// Multiplies kX rows of x with the rows of weights from `begin` to `end`. The rows of a tile are from as many parts of
// them, see few_rows.h. Each block of weights is decoded once, and the result of a row of x does not depend on other
// rows.
template <Encoding encoding, int kDigits, int kX, class T>
void multiply_bytes(T* out, const QuantizedLinear& args, const uint8_t* blocks, const ByteBlock* x, int64_t begin,
                    int64_t end) {
  constexpr int kRows = kRowsAtOnce;
  // So many groups that the sums stay in registers.
  constexpr int kGroups = kX <= 2 ? kByteGroups : smaller(kByteGroups, 2);
  const int64_t num_blocks = args.in_features / kBlockSize, stride = num_blocks * block_bytes(encoding);
  int64_t part = (end - begin + kRows - 1) / kRows;
  // Streams that are pages apart would all share one set of the first cache.
  if (part * stride % 4096 == 0) ++part;
  for (int64_t o = begin; o < begin + part; ++o) {
    const uint8_t* rows[kRows];
    for (int r = 0; r < kRows; ++r) rows[r] = blocks + (smaller(o + r * part, end - 1) - begin) * stride;
    float result[kX][kRows];
    for (int first = 0; first < kByteGroups; first += kGroups) {
      RowSums<encoding, kDigits> sums[kX][kGroups];
      for (int64_t b = 0; b < num_blocks; ++b) {
        const int64_t offset = b * block_bytes(encoding);
        if constexpr (encoding == Encoding::kQ8_0) {  // decoding Q4_1 takes longer than its bytes
          for (int r = 0; r < kGroups * Bytes::kRows; ++r) {
            prefetch_stream(rows[first * Bytes::kRows + r] + offset, args.prefetching);
          }
        }
#pragma GCC unroll 8
        for (int g = 0; g < kGroups; ++g) {
          const uint8_t* const* group = rows + (first + g) * Bytes::kRows;
          const WeightBytes<encoding> weights(group, offset);
#pragma GCC unroll 8
          for (int i = 0; i < kX; ++i) sums[i][g].add(weights, group, offset, x[i * num_blocks + b]);
        }
      }
      for (int i = 0; i < kX; ++i) {
        for (int g = 0; g < kGroups; ++g) sums[i][g].store(result[i] + (first + g) * Bytes::kRows);
      }
    }
    for (int i = 0; i < kX; ++i) {
      for (int r = 0; r < kRows && o + r * part < end; ++r) {
        from_float(result[i][r], out[i * args.out_features + o + r * part]);
      }
    }
  }
}

template <Encoding encoding, int kDigits, class T>
bool multiply_digits(const QuantizedLinear& args, const float* x, const Executor& executor) {
  const int64_t num_blocks = args.in_features / kBlockSize, total = args.rows * num_blocks;
  Scratch scratch(total * static_cast<int64_t>(sizeof(ByteBlock) / sizeof(float)));
  auto* blocks = reinterpret_cast<ByteBlock*>(scratch.data());
  if (!to_bytes<unpacked(encoding), kDigits>(blocks, x, total)) return false;
  const double of_rows = (kDigits == 3 ? 0.5 : 0.2) * static_cast<double>(args.rows);
  parallel_for(
      executor, args.out_features,
      static_cast<double>(num_blocks) * ((encoding == Encoding::kQ4_1 ? 0.8 : 1.0) + of_rows),
      [&](int64_t begin, int64_t end) {
        for_unpacked_rows<encoding>(args.blocks, args.in_features, begin, end,
                                    [&](const uint8_t* weights, int64_t o, int64_t last) {
                                      for_few_rows(args.rows, [&](auto count, int64_t first) {
                                        multiply_bytes<unpacked(encoding), kDigits, decltype(count)::value>(
                                            static_cast<T*>(args.out) + first * args.out_features, args, weights,
                                            blocks + first * num_blocks, o, last);
                                      });
                                    });
      },
      kRowsAtOnce);
  return true;
}

// Returns false if x has no form in bytes.
template <Encoding encoding, class T>
bool multiply_vectors(const QuantizedLinear& args, const float* x, const Executor& executor) {
  return args.quantized_activations ? multiply_digits<encoding, 1, T>(args, x, executor)
                                    : multiply_digits<encoding, 3, T>(args, x, executor);
}

}  // namespace
}  // namespace eqxcallback::cpu
