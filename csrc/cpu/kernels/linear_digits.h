// Blocks of x as digits, for the products of bytes of the processor.
//
// Each block becomes integers of 23 bits and a power of two, x = 2^e n, and n three signed digits,
// n = 2^16 a + 2^8 b + c. The products of the digits with the weights' integers are exact, and cost less than decoding
// weights to f32. Only x is rounded, by at most 2^-22 of the highest value in its block of 32. The sum of the
// magnitudes bounds the error, as it does for sums in f32; but if the highest value meets a weight of zero, f32 would
// be nearer.
//
// Or x is quantised to one digit, as the caller has asked: x = s n, where s is a 127th of the highest value.
#pragma once

#include "cpu/kernels/linear_activations.h"
#include "cpu/kernels/linear_unpack.h"

namespace eqxcallback::cpu {
namespace {

using Ints = Bytes::Ints;

// So much higher is an integer weight of an encoding than what it stands for.
constexpr int32_t too_high(Encoding encoding) {
  if (encoding == Encoding::kQ4_1 || encoding == Encoding::kQ4_1_R16) return 0;
  return is_plain(encoding) ? kTooHighPlain : Bytes::kTooHigh;
}

// Computes the power of two of integers of 23 bits. Returns false if x has no such form: if it is not finite, or so
// high that sums of it are not.
bool exact_steps(Steps& steps, const float* x) {
  const float highest = magnitude_of(x, kBlockSize);
  if (highest > kSummable) return false;
  // By bits: calls of the library took a quarter of the time of a block.
  const auto power_of_two = [](int exponent) {
    const int bits = (exponent + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof(power));
    return power;
  };
  int bits;
  std::memcpy(&bits, &highest, sizeof(bits));
  int exponent = (bits >> 23) - 126;       // highest < 2^exponent
  exponent = larger(exponent, -103) - 22;  // 2^exponent and its inverse are normal numbers; below that, digits are lost
  steps = {power_of_two(exponent), power_of_two(-exponent)};
  return true;
}

template <int kDigits>
bool digit_steps(Steps& steps, const float* x) {
  return kDigits == 3 ? exact_steps(steps, x) : steps_of(steps, x, kBlockSize, kSummable);
}

// Sums over half of a block: of the lowest digits, and of what is above them.
struct DigitSums {
  int32_t lower, upper;
};

// Splits half of a block into kRows digits, from the lowest on, which are so far apart. Adds what they stand for to
// `total`.
template <int kDigits, int kRows>
[[gnu::always_inline]] inline DigitSums split_half(int8_t* digits, int64_t apart, const float* x, int half,
                                                   const Steps& steps, F& total) {
  Ints whole{}, upper{};
  for (int64_t i = half * kBlockSize / 2; i < (half + 1) * kBlockSize / 2; i += kLanes) {
    const F values = Simd::load(x + i);
    Ints n = Bytes::nearest(Simd::mul(values, Simd::broadcast(steps.inverse)));
    const F seen = kDigits == 3 ? values : Simd::mul(__builtin_convertvector(n, F), Simd::broadcast(steps.scale));
    total = Simd::add(total, seen);
    whole += n;
#pragma GCC unroll 3
    for (int d = 0; d < kRows; ++d) {  // the lowest byte, as a signed digit
      Bytes::store_lowest(digits + d * apart + i, n);
      n = (n + 128) >> 8;
      if (d == 0) upper += n;
    }
  }
  const int32_t of_upper = Bytes::sum(upper);
  return {Bytes::sum(whole) - 256 * of_upper, of_upper};
}

// What 32 weights of each of several rows meet that are side by side, four neighbours of a row in a lane.
template <int kDigits>
struct alignas(64) LaneBlock {
  int8_t digits[kDigits][kBlockSize];  // from the lowest on
  // What is too much in the sums of each half with the lowest digits, and with the upper ones, negated. Of encodings
  // without halves the first one is of the whole block.
  int32_t lower[2], upper[2];
  float sum;                       // of x
  float lower_scale, upper_scale;  // 2^e, 2^(e + 8); or s, 0
};

// Returns false if x has no form in bytes.
template <Encoding encoding, int kDigits>
bool to_lanes(LaneBlock<kDigits>* blocks, const float* x, int64_t num_blocks) {
  for (int64_t b = 0; b < num_blocks; ++b, x += kBlockSize) {
    LaneBlock<kDigits>& block = blocks[b];
    Steps steps;
    if (!digit_steps<kDigits>(steps, x)) return false;
    F sum = Simd::zero();
    for (int half = 0; half < 2; ++half) {
      const DigitSums sums = split_half<kDigits, kDigits>(block.digits[0], kBlockSize, x, half, steps, sum);
      block.lower[half] = -too_high(encoding) * sums.lower;
      block.upper[half] = -too_high(encoding) * sums.upper;
    }
    if constexpr (encoding != Encoding::kPlainHalves) {
      block.lower[0] += block.lower[1];
      block.upper[0] += block.upper[1];
    }
    block.sum = Simd::sum(sum);
    block.lower_scale = steps.scale;
    block.upper_scale = kDigits == 3 ? 256 * steps.scale : 0;
  }
  return true;
}

// As many rows of x at a time as stay in the second cache, to be multiplied by all rows of weights before the next
// ones. Blocks have kRows rows, of which set(block, r, x, num_blocks) sets one, and returns false if it has no form in
// bytes.
template <class Block, int kRows, int64_t kBytes>
class RowsAtOnce {
 public:
  // As many as there are, or a multiple of so many.
  RowsAtOnce(int64_t num_rows, int64_t num_blocks, int64_t multiple)
      : num_blocks_(num_blocks),
        step_(smaller(num_rows, larger<int64_t>(1, most(num_blocks) / multiple) * multiple)),
        floats_((step_ + kRows - 1) / kRows * num_blocks * kFloats),
        scratch_(floats_ + step_) {}

  int64_t step() const { return step_; }
  // The blocks of row r, a multiple of kRows.
  const Block* row(int64_t r) const { return blocks(r); }

  // Returns false if one of the rows has no form in bytes.
  template <class Set>
  bool set(const float* x, int64_t rows, const Executor& executor, const Set& set) {
    float* has_form = scratch_.data() + floats_;
    parallel_for(executor, rows, static_cast<double>(num_blocks_) * 10, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        has_form[r] = set(blocks(r), r % kRows, x + r * num_blocks_ * kBlockSize, num_blocks_);
      }
    });
    for (int64_t r = 0; r < rows; ++r) {
      if (has_form[r] == 0) return false;
    }
    return true;
  }

 private:
  static constexpr int64_t kFloats = sizeof(Block) / sizeof(float);
  static int64_t most(int64_t num_blocks) {
    return kBytes * kRows / (larger<int64_t>(1, num_blocks) * static_cast<int64_t>(sizeof(Block)));
  }
  Block* blocks(int64_t r) const { return reinterpret_cast<Block*>(scratch_.data()) + r / kRows * num_blocks_; }

  int64_t num_blocks_, step_, floats_;
  Scratch scratch_;
};

template <Encoding encoding, int kDigits>
struct LaneRows : RowsAtOnce<LaneBlock<kDigits>, 1, int64_t{1} << 19> {
  using Rows = RowsAtOnce<LaneBlock<kDigits>, 1, int64_t{1} << 19>;
  using Rows::Rows;

  bool set(const float* x, int64_t rows, const Executor& executor) {
    return Rows::set(x, rows, executor, [](auto* blocks, int64_t, const float* row, int64_t num_blocks) {
      return to_lanes<encoding>(blocks, row, num_blocks);
    });
  }
};

}  // namespace
}  // namespace eqxcallback::cpu
