// Products of bytes by AVX-512 VNNI, which multiplies unsigned bytes by signed ones: weights are 128 too high. This
// file lists and explains the functions that each instruction set with products of bytes defines.
#pragma once

#include "cpu/simd/avx512.h"

// Tells cpu/kernels that there are `Bytes`.
#define EQXCALLBACK_BYTES

namespace eqxcallback::cpu {
namespace {

struct Bytes {
  using F = Simd::F;
  // Integers, or fours of bytes. `Simd::fma` multiplies digits, which have a sign, by weights, and adds fours of them.
  using Ints = Simd::Ints;
  static constexpr int32_t kTooHigh = 128;  // so much higher is a weight than what it stands for
  static Ints as_weights(Ints x) { return x ^ static_cast<int32_t>(0x80808080u); }

  static Ints load(const void* p) { return reinterpret_cast<Ints>(_mm512_loadu_si512(p)); }
  // Loads some bytes. The others are zero, and are not touched in memory.
  using Mask = __mmask64;
  static Mask first(int64_t n) { return ~Mask{0} >> (64 - n); }  // n > 0
  static Ints load(const void* p, Mask mask) { return reinterpret_cast<Ints>(_mm512_maskz_loadu_epi8(mask, p)); }
  static void store(int32_t* p, Ints x) { _mm512_storeu_si512(p, reinterpret_cast<__m512i>(x)); }
  // The lowest byte of each lane.
  static void store_lowest(int8_t* p, Ints x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(x)));
  }
  static Ints nearest(F x) { return reinterpret_cast<Ints>(_mm512_cvtps_epi32(x)); }
  static int32_t sum(Ints x) { return _mm512_reduce_add_epi32(reinterpret_cast<__m512i>(x)); }

  // A vector has 16 bytes of each of so many rows of weights, which meet the same 16 digits.
  static constexpr int kRows = 4;
  static Ints for_all_rows(const void* p) {
    return reinterpret_cast<Ints>(_mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static Ints load_rows(const uint8_t* const* rows, int64_t offset) {
    const auto row = [&](int r) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[r] + offset)); };
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(row(0)), row(1), 1);
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(row(2)), row(3), 1);
    return reinterpret_cast<Ints>(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
  }
  // Loads a half of each row, into the lanes of the row's bytes.
  static F scales(const uint8_t* const* rows, int64_t offset) {
    const auto head = [&](int r) {
      uint16_t bits;
      std::memcpy(&bits, rows[r] + offset, sizeof(bits));
      return static_cast<int64_t>(bits);
    };
    const __m128 heads = _mm_cvtph_ps(_mm_cvtsi64_si128(head(0) | head(1) << 16 | head(2) << 32 | head(3) << 48));
    const __m512i spread = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return _mm512_permutexvar_ps(spread, _mm512_castps128_ps512(heads));
  }
  // Does the same with a float of each row.
  static F floats(const uint8_t* const* rows, int64_t offset) {
    const auto value = [&](int r) { return _mm_load_ss(reinterpret_cast<const float*>(rows[r] + offset)); };
    const __m128 low = _mm_unpacklo_ps(value(0), value(1)), high = _mm_unpacklo_ps(value(2), value(3));
    const __m512i spread = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return _mm512_permutexvar_ps(spread, _mm512_castps128_ps512(_mm_movelh_ps(low, high)));
  }
  // Loads scales as `scales` does, and the minimum that follows each. Adds the minimum times the second number of
  // `factor`, a pair {0, factor}, to `minimums`.
  using Minimums = __m256;
  static Minimums no_minimums() { return _mm256_setzero_ps(); }
  static F scales_and_minimums(const uint8_t* const* rows, int64_t offset, const float* factor, Minimums& minimums) {
    const auto head = [&](int r) {
      int32_t bits;
      std::memcpy(&bits, rows[r] + offset, sizeof(bits));
      return bits;
    };
    const __m256 heads = _mm256_cvtph_ps(_mm_setr_epi32(head(0), head(1), head(2), head(3)));
    const __m256 pairs = _mm256_castpd_ps(_mm256_broadcast_sd(reinterpret_cast<const double*>(factor)));
    minimums = _mm256_fmadd_ps(heads, pairs, minimums);
    const __m512i spread = _mm512_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6);
    return _mm512_permutexvar_ps(spread, _mm512_castps256_ps512(heads));
  }
  static float total(Minimums minimums, int row) { return minimums[2 * row + 1]; }

  // A vector has the weights of so many neighbouring blocks, or one of so many parts of a block.
  static constexpr int kBlocks = 2, kParts = 1;
  template <Encoding encoding>
  static Ints of_blocks(const uint8_t* const* blocks, int) {
    return reinterpret_cast<Ints>(
        _mm512_inserti64x4(_mm512_castsi256_si512(of_block<encoding>(blocks[0])), of_block<encoding>(blocks[1]), 1));
  }

 private:
  template <Encoding encoding>
  static __m256i of_block(const uint8_t* block) {
    if constexpr (encoding == Encoding::kQ4_1) {
      const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block + 4));
      const __m256i halves = _mm256_inserti128_si256(_mm256_castsi128_si256(both), _mm_srli_epi16(both, 4), 1);
      return _mm256_and_si256(halves, _mm256_set1_epi8(15));
    } else if constexpr (encoding >= Encoding::kPlain) {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block));
    } else {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + 2));
      return _mm256_xor_si256(bytes, _mm256_set1_epi8(static_cast<char>(0x80)));
    }
  }
};

}  // namespace
}  // namespace eqxcallback::cpu
