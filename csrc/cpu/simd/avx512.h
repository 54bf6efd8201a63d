// Sixteen lanes of f32 in AVX-512. simd/portable.h says what each function means.
#pragma once

#include <immintrin.h>

#include "cpu/simd/x86.h"

namespace eqxcallback::cpu {
namespace {

struct Simd : Halves {
  static constexpr int kLanes = 16;
  static constexpr bool kFmaRoundsOnce = true;
  static constexpr int kDotRows = 4, kDotColumns = 4;
  static constexpr int kOuterRows = 6, kOuterVectors = 4;

  using F = __m512;

  static F zero() { return _mm512_setzero_ps(); }
  static F broadcast(float value) { return _mm512_set1_ps(value); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static F load(const Bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static F load(const F16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static F load(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static F load(const Bf16* p, int n) { return widen(_mm256_maskz_loadu_epi16(first(n), p)); }
  static F load(const F16* p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p)); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static void store(Bf16* p, F x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x)); }
  static void store(F16* p, F x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_f16(x)); }
  static void store(float* p, F x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
  static void store(Bf16* p, F x, int n) { _mm256_mask_storeu_epi16(p, first(n), narrow(x)); }
  static void store(F16* p, F x, int n) { _mm256_mask_storeu_epi16(p, first(n), narrow_f16(x)); }
  static void stream(float* p, F x) { _mm512_stream_ps(p, x); }
  static void end_streams() { _mm_sfence(); }

  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F abs(F x) { return _mm512_abs_ps(x); }
  static bool any_less(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ) != 0; }
  static F select_less(F a, F b, F yes, F no) {
    return _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), yes);
  }
  static F first_or(F x, int n, float other) { return _mm512_mask_mov_ps(broadcast(other), first(n), x); }
  static float sum(F x) { return _mm512_reduce_add_ps(x); }
  static float maximum(F x) { return _mm512_reduce_max_ps(x); }

  // In each quarter, the sums of that quarter of four vectors.
  static F quarters_of_sums(F a, F b, F c, F d) {
    const F ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const F cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d p = _mm512_castps_pd(ab), q = _mm512_castps_pd(cd);
    return add(_mm512_castpd_ps(_mm512_unpacklo_pd(p, q)), _mm512_castpd_ps(_mm512_unpackhi_pd(p, q)));
  }
  static F sums(const F* x) {
    F four[4];
    for (int i = 0; i < 4; ++i) four[i] = quarters_of_sums(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    const F left = add(_mm512_shuffle_f32x4(four[0], four[1], 0x88), _mm512_shuffle_f32x4(four[0], four[1], 0xdd));
    const F right = add(_mm512_shuffle_f32x4(four[2], four[3], 0x88), _mm512_shuffle_f32x4(four[2], four[3], 0xdd));
    return add(_mm512_shuffle_f32x4(left, right, 0x88), _mm512_shuffle_f32x4(left, right, 0xdd));
  }

  static void four_sums(float* out, F a, F b, F c, F d) {
    const F four = quarters_of_sums(a, b, c, d);
    const __m256 two = _mm256_add_ps(_mm512_castps512_ps256(four), _mm512_extractf32x8_ps(four, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1)));
  }

  static void transpose(F* x) {
    F pairs[kLanes], fours[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes; i += 2) {
      pairs[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
      pairs[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kLanes; i += 4) {
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        const __m512d first = _mm512_castps_pd(pairs[i + j]), last = _mm512_castps_pd(pairs[i + 2 + j]);
        fours[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(first, last));
        fours[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(first, last));
      }
    }
    // Now fours[4 * i + j] has columns j, 4 + j, 8 + j and 12 + j of rows 4 * i to 4 * i + 3.
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const F even_first = _mm512_shuffle_f32x4(fours[j], fours[4 + j], 0x88);
      const F even_last = _mm512_shuffle_f32x4(fours[8 + j], fours[12 + j], 0x88);
      const F odd_first = _mm512_shuffle_f32x4(fours[j], fours[4 + j], 0xdd);
      const F odd_last = _mm512_shuffle_f32x4(fours[8 + j], fours[12 + j], 0xdd);
      x[j] = _mm512_shuffle_f32x4(even_first, even_last, 0x88);
      x[4 + j] = _mm512_shuffle_f32x4(odd_first, odd_last, 0x88);
      x[8 + j] = _mm512_shuffle_f32x4(even_first, even_last, 0xdd);
      x[12 + j] = _mm512_shuffle_f32x4(odd_first, odd_last, 0xdd);
    }
  }

  static F nearest(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F exp2(F x) {
    const F n = nearest(x);  // of an infinity: then the fraction is NaN, which scales to 0 or an infinity
    return _mm512_scalef_ps(exp2_of_fraction<Simd>(sub(x, n)), n);
  }
  static F mask_first(F x, int64_t n) {
    if (n <= 0) return x;
    return _mm512_mask_mov_ps(x, first(static_cast<int>(smaller<int64_t>(n, kLanes))), broadcast(-__builtin_inff()));
  }

  // A permutation looks at the lowest four bits of its indices: it decodes without masking.
  static F low_nibbles(const uint8_t* p) { return low_nibbles(p, digits()); }
  static F high_nibbles(const uint8_t* p) { return high_nibbles(p, digits()); }
  // Looks each nibble up in `table`.
  static F low_nibbles(const uint8_t* p, F table) { return _mm512_permutexvar_ps(bytes(p), table); }
  static F high_nibbles(const uint8_t* p, F table) {
    return _mm512_permutexvar_ps(_mm512_srli_epi32(bytes(p), 4), table);
  }
  // d q + m of the halves d and m.
  static F table_of_nibbles(const uint8_t* p) {
    int32_t bits;
    std::memcpy(&bits, p, sizeof(bits));
    const __m128 both = _mm_cvtph_ps(_mm_cvtsi32_si128(bits));
    const F minimum = _mm512_permutexvar_ps(_mm512_set1_epi32(1), _mm512_castps128_ps512(both));
    return fma(digits(), _mm512_broadcastss_ps(both), minimum);
  }
  static F int8s(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }

#ifdef __AVX512VNNI__
  // Products of fours of bytes, signed and unsigned. The sums are integers.
  using Ints = int32_t __attribute__((vector_size(64)));
  static Ints fma(Ints a, Ints b, Ints c) {
    return reinterpret_cast<Ints>(
        _mm512_dpbusd_epi32(reinterpret_cast<__m512i>(c), reinterpret_cast<__m512i>(b), reinterpret_cast<__m512i>(a)));
  }
#endif
#ifdef __AVX512BF16__
#define EQXCALLBACK_PAIRS
  // Pairs of bf16. Their products are exact in f32, and are added one after the other.
  static __m512bh load_pairs(const Bf16* p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }
  static __m512bh load_pairs(const Bf16* p, int n) {
    return reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16((1u << n) - 1u, p));
  }
  static __m512bh broadcast_pair(const Bf16* p) {
    int32_t bits;
    std::memcpy(&bits, p, sizeof(bits));
    return reinterpret_cast<__m512bh>(_mm512_set1_epi32(bits));
  }
  static F fma(__m512bh a, __m512bh b, F c) { return _mm512_dpbf16_ps(c, a, b); }
  // A pair in each lane: the numbers of two rows, or rounded from two vectors.
  static F pairs(const Bf16* first, const Bf16* second) {
    const auto half = [](const Bf16* p) {
      return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    };
    return _mm512_castsi512_ps(_mm512_or_si512(half(first), _mm512_slli_epi32(half(second), 16)));
  }
  static F pairs(F first, F second) {
    const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
    const __m512i lanes = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(lanes, both));
  }
  static F first_of_pairs(F pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs), 16)); }
  static F second_of_pairs(F pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pairs), _mm512_set1_epi32(~0xffff)));
  }
#endif

  static F scale_and_minimum(const uint8_t* p, const float* factor, Minimums& minimums) {
    return _mm512_broadcastss_ps(add_minimum(p, factor, minimums));
  }

 private:
  static __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
  // Widens each number into the high half of its lane.
  static F widen(__m256i x) {
    const __m512i lanes = _mm512_set_epi16(15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0, 7, 0, 6, 0, 5, 0, 4, 0,
                                           3, 0, 2, 0, 1, 0, 0, 0);
    return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, lanes, _mm512_castsi256_si512(x)));
  }
  // Rounds to the nearest, ties to even.
#ifdef __AVX512BF16__
  static __m256i narrow(F x) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)); }
#else
  // Adds half of what is cut off, and a little less if the last bit is even. That is a product of halves:
  // 1 * 0x7fff + the last bit * 1. A NaN is only cut off.
  static __m256i narrow(F x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i halves = _mm512_ternarylogic_epi32(bits, _mm512_set1_epi32(0x10000), _mm512_set1_epi32(1), 0xea);
    const __mmask16 is_number = _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q);
    const __m512i result = _mm512_mask_dpwssd_epi32(bits, is_number, halves, _mm512_set1_epi32(0x17fff));
    return _mm512_castsi512_si256(_mm512_permutexvar_epi16(high_halves(), result));
  }
#endif
  static __m256i narrow_f16(F x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static __m512i high_halves() {  // puts the odd numbers of 16 bits in front
    return _mm512_set_epi16(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11,
                            9, 7, 5, 3, 1);
  }
  static __m512i bytes(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static F digits() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
};

}  // namespace
}  // namespace eqxcallback::cpu
