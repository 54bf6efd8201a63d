// One row of x times quantised weights, by the products of bytes of AVX-512 VNNI.
//
// Each block of x becomes integers of 23 bits and a power of two, x = 2^e n, and n three signed digits,
// n = 2^16 a + 2^8 b + c. Their products with the weights' integers are exact, and cost less than decoding weights to
// f32. What is rounded is x, by at most 2^-22 of the highest in its block of 32. The sum of the magnitudes bounds the
// error, as it does for sums in f32; but where the highest meets a weight of zero, f32 would be nearer.
//
// Or x is quantised to one digit, as the caller has asked for: x = s n with s a 127th of the highest.
#pragma once

#include "cpu/kernels/linear_activations.h"

namespace eqxcallback::cpu {
namespace {

inline constexpr int kByteRows = 4;    // rows of weights in one register
inline constexpr int kByteGroups = 2;  // such registers at a time

struct alignas(64) ByteBlock {
  int8_t high[kBlockSize], middle[kBlockSize], low[kBlockSize];
  int32_t upper_offset[4], lower_offset[4];  // -128 times the sums of the digits, as they meet the lanes of a product
  float pair[2];                             // 0, sum of x
  float lower_scale, upper_scale;            // 2^e, 2^(e + 8); or s, 0
};

__m512i four_times(const void* p) {
  return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
}

// Of 4 rows, 16 bytes each with both halves of a block, the sums of products with n: 4 sums a row, and in two parts,
// 2^8 upper + lower, for an integer has no room for the whole. Of one digit there are no upper ones.
template <int kDigits>
struct ByteDots {
  __m512i upper, lower;

  ByteDots(__m512i first, __m512i second, const ByteBlock& x) {
    const auto add = [&](__m512i sum, const int8_t* digits) {
      return _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sum, first, four_times(digits)), second, four_times(digits + 16));
    };
    const __m512i zero = _mm512_setzero_si512();
    if constexpr (kDigits == 3) upper = add(_mm512_slli_epi32(add(zero, x.high), 8), x.middle);
    lower = add(zero, x.low);
  }
};

// The power of two of integers of 23 bits. False if x has no such form: it is not finite, or so high that sums of it
// are not.
bool exact_steps(Steps& steps, const float* x) {
  const F left = Simd::load(x), right = Simd::load(x + kLanes);
  constexpr int kNanOrInf = 0x99;
  if (_mm512_fpclass_ps_mask(left, kNanOrInf) | _mm512_fpclass_ps_mask(right, kNanOrInf)) return false;
  const float highest = Simd::maximum(Simd::max(_mm512_abs_ps(left), _mm512_abs_ps(right)));
  if (highest > kSummable) return false;
  int exponent = 0;
  __builtin_frexpf(highest, &exponent);    // highest < 2^exponent
  exponent = larger(exponent, -103) - 22;  // 2^exponent and its inverse are normal: below, digits are lost
  steps = {__builtin_ldexpf(1.0f, exponent), __builtin_ldexpf(1.0f, -exponent)};
  return true;
}

// False if x has no form in bytes.
template <int kDigits>
bool to_bytes(ByteBlock* blocks, const float* x, int64_t num_blocks) {
  for (int64_t b = 0; b < num_blocks; ++b, x += kBlockSize) {
    ByteBlock& block = blocks[b];
    Steps steps;
    if (!(kDigits == 3 ? exact_steps(steps, x) : steps_of(steps, x, kBlockSize, kSummable))) return false;
    block.lower_scale = steps.scale;
    block.upper_scale = kDigits == 3 ? 256 * steps.scale : 0;
    block.pair[0] = 0;
    F sum = Simd::zero();
    for (int half = 0; half < 2; ++half) {
      const F values = Simd::load(x + half * kLanes);
      __m512i n = _mm512_cvtps_epi32(Simd::mul(values, Simd::broadcast(steps.inverse)));
      const F seen = kDigits == 3 ? values : Simd::mul(_mm512_cvtepi32_ps(n), Simd::broadcast(steps.scale));
      sum = Simd::add(sum, seen);
      // The lowest byte as a signed digit, and what is left.
      const auto put = [&](int8_t* p) {
        _mm_store_si128(reinterpret_cast<__m128i*>(p + half * kLanes), _mm512_cvtepi32_epi8(n));
        n = _mm512_srai_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(128)), 8);
      };
      put(block.low);
      put(block.middle);
      put(block.high);
    }
    block.pair[1] = Simd::sum(sum);
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
    const ByteDots<3> sums(sign, sign, block);
    const auto put_negative = [](int32_t* p, __m512i x) {
      _mm_store_si128(reinterpret_cast<__m128i*>(p), _mm_sub_epi32(_mm_setzero_si128(), _mm512_castsi512_si128(x)));
    };
    put_negative(block.upper_offset, sums.upper);
    put_negative(block.lower_offset, sums.lower);
  }
  return true;
}

__m512i load_rows(const uint8_t* const* rows, int64_t offset) {
  const auto row = [&](int r) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[r] + offset)); };
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(row(0)), row(1), 1);
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(row(2)), row(3), 1);
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// The sums of 4 rows over the blocks, in 4 lanes each, and those of the minimums in 2 lanes each.
template <Encoding encoding, int kDigits>
struct RowSums {
  F total = Simd::zero();
  __m256 minimums = _mm256_setzero_ps();

  void add(const uint8_t* const* rows, int64_t offset, const ByteBlock& x) {
    if constexpr (encoding == Encoding::kQ4_1) {
      const auto head = [&](int r) {  // scale and minimum
        int32_t bits;
        std::memcpy(&bits, rows[r] + offset, sizeof(bits));
        return bits;
      };
      const __m256 heads = _mm256_cvtph_ps(_mm_setr_epi32(head(0), head(1), head(2), head(3)));
      const __m256 factor = _mm256_castpd_ps(_mm256_broadcast_sd(reinterpret_cast<const double*>(x.pair)));
      minimums = _mm256_fmadd_ps(heads, factor, minimums);
      const __m512i mask = _mm512_set1_epi8(15), bytes = load_rows(rows, offset + 4);
      const ByteDots<kDigits> dots(_mm512_and_si512(bytes, mask), _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask),
                                   x);
      const __m512i spread = _mm512_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6);
      take(dots, _mm512_permutexvar_ps(spread, _mm512_castps256_ps512(heads)), x);
    } else {
      const auto head = [&](int r) {
        uint16_t bits;
        std::memcpy(&bits, rows[r] + offset, sizeof(bits));
        return static_cast<int64_t>(bits);
      };
      const __m128 heads = _mm_cvtph_ps(_mm_cvtsi64_si128(head(0) | head(1) << 16 | head(2) << 32 | head(3) << 48));
      const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));  // int8 + 128 has no sign
      const __m512i first = _mm512_xor_si512(load_rows(rows, offset + 2), sign);
      const __m512i second = _mm512_xor_si512(load_rows(rows, offset + 18), sign);
      ByteDots<kDigits> dots(first, second, x);
      if constexpr (kDigits == 3) dots.upper = _mm512_add_epi32(dots.upper, four_times(x.upper_offset));
      dots.lower = _mm512_add_epi32(dots.lower, four_times(x.lower_offset));
      const __m512i spread = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
      take(dots, _mm512_permutexvar_ps(spread, _mm512_castps128_ps512(heads)), x);
    }
  }

  void take(const ByteDots<kDigits>& dots, F scale, const ByteBlock& x) {
    F dot = Simd::mul(_mm512_cvtepi32_ps(dots.lower), Simd::broadcast(x.lower_scale));
    if constexpr (kDigits == 3) dot = Simd::fma(_mm512_cvtepi32_ps(dots.upper), Simd::broadcast(x.upper_scale), dot);
    total = Simd::fma(dot, scale, total);
  }

  void store(float* out) const {
    float lanes[kLanes], rest[8];
    Simd::store(lanes, total);
    _mm256_storeu_ps(rest, minimums);
    for (int r = 0; r < kByteRows; ++r) {
      const float* lane = lanes + 4 * r;
      out[r] = (lane[0] + lane[1]) + (lane[2] + lane[3]) + rest[2 * r + 1];
    }
  }
};

// The products with the rows of weights from `begin` to `end`. Those of a tile are from as many parts of them, see
// dots.h.
template <Encoding encoding, int kDigits, class T>
void multiply_bytes(T* out, const uint8_t* weights, int64_t stride, const ByteBlock* x, int64_t num_blocks,
                    int64_t begin, int64_t end) {
  constexpr int kRows = kByteRows * kByteGroups;
  int64_t part = (end - begin + kRows - 1) / kRows;
  // Streams that are pages apart would have one set of the first cache for all.
  if (part * stride % 4096 == 0) ++part;
  for (int64_t o = begin; o < begin + part; ++o) {
    const uint8_t* rows[kRows];
    for (int r = 0; r < kRows; ++r) rows[r] = weights + smaller(o + r * part, end - 1) * stride;
    RowSums<encoding, kDigits> sums[kByteGroups];
    for (int64_t b = 0; b < num_blocks; ++b) {
      const int64_t offset = b * block_bytes(encoding);
      if constexpr (encoding == Encoding::kQ8_0) {  // decoding Q4_1 takes longer than its bytes
        for (const uint8_t* row : rows) prefetch_stream(row + offset);
      }
#pragma GCC unroll 2
      for (int g = 0; g < kByteGroups; ++g) sums[g].add(rows + g * kByteRows, offset, x[b]);
    }
    float result[kRows];
    for (int g = 0; g < kByteGroups; ++g) sums[g].store(result + g * kByteRows);
    for (int r = 0; r < kRows && o + r * part < end; ++r) from_float(result[r], out[o + r * part]);
  }
}

template <Encoding encoding, int kDigits, class T>
bool multiply_digits(const QuantizedLinear& args, const float* x, const Executor& executor) {
  const int64_t num_blocks = args.in_features / kBlockSize, stride = num_blocks * block_bytes(encoding);
  Scratch scratch(num_blocks * static_cast<int64_t>(sizeof(ByteBlock) / sizeof(float)));
  auto* blocks = reinterpret_cast<ByteBlock*>(scratch.data());
  if (!to_bytes<kDigits>(blocks, x, num_blocks)) return false;
  parallel_for(
      executor, args.out_features, static_cast<double>(num_blocks) * (encoding == Encoding::kQ4_1 ? 1.3 : 1.5),
      [&](int64_t begin, int64_t end) {
        multiply_bytes<encoding, kDigits>(static_cast<T*>(args.out), args.blocks, stride, blocks, num_blocks, begin,
                                          end);
      },
      kByteRows * kByteGroups);
  return true;
}

// False if x has no form in bytes.
template <Encoding encoding, class T>
bool multiply_vector(const QuantizedLinear& args, const float* x, const Executor& executor) {
  return args.quantized_activations ? multiply_digits<encoding, 1, T>(args, x, executor)
                                    : multiply_digits<encoding, 3, T>(args, x, executor);
}

}  // namespace
}  // namespace eqxcallback::cpu
