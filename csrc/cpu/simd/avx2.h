// Eight lanes of f32 in AVX2, with FMA and F16C. simd/portable.h says what each function means.
#pragma once

#include <immintrin.h>

#include "cpu/simd/x86.h"

namespace eqxcallback::cpu {
namespace {

struct Simd : Halves {
  static constexpr int kLanes = 8;
  static constexpr bool kFmaRoundsOnce = true;
  static constexpr int kDotRows = 4, kDotColumns = 2;
  static constexpr int kOuterRows = 6, kOuterVectors = 2;

  using F = __m256;

  static F zero() { return _mm256_setzero_ps(); }
  static F broadcast(float value) { return _mm256_set1_ps(value); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static F load(const Bf16* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static F load(const F16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static F load(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
  template <class T>
  static F load(const T* p, int n) {
    T lanes[kLanes] = {};
    std::memcpy(lanes, p, static_cast<size_t>(n) * sizeof(T));
    return load(lanes);
  }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static void store(Bf16* p, F x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(x)); }
  static void store(F16* p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static void store(float* p, F x, int n) { _mm256_maskstore_ps(p, first(n), x); }
  template <class T>
  static void store(T* p, F x, int n) {
    T lanes[kLanes];
    store(lanes, x);
    std::memcpy(p, lanes, static_cast<size_t>(n) * sizeof(T));
  }

  static void stream(float* p, F x) { _mm256_stream_ps(p, x); }
  static void end_streams() { _mm_sfence(); }

  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F abs(F x) { return _mm256_andnot_ps(broadcast(-0.0f), x); }
  static bool any_less(F a, F b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ)) != 0; }
  static F select_less(F a, F b, F yes, F no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
  static F first_or(F x, int n, float other) {
    return _mm256_blendv_ps(broadcast(other), x, _mm256_castsi256_ps(first(n)));
  }
  static float sum(F x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return s[0] + s[1];
  }
  static float maximum(F x) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return larger(s[0], s[1]);
  }

  static F sums(const F* x) {
    F four[2];
    for (int i = 0; i < 2; ++i) {
      four[i] = _mm256_hadd_ps(_mm256_hadd_ps(x[4 * i], x[4 * i + 1]), _mm256_hadd_ps(x[4 * i + 2], x[4 * i + 3]));
    }
    return add(_mm256_permute2f128_ps(four[0], four[1], 0x20), _mm256_permute2f128_ps(four[0], four[1], 0x31));
  }

  static void four_sums(float* out, F a, F b, F c, F d) {
    const F four = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(four), _mm256_extractf128_ps(four, 1)));
  }

  static void transpose(F* x) {
    F four[kLanes];
#pragma GCC unroll 2
    for (int i = 0; i < kLanes; i += 4) {
      const __m256d low_first = _mm256_castps_pd(_mm256_unpacklo_ps(x[i], x[i + 1])),
                    high_first = _mm256_castps_pd(_mm256_unpackhi_ps(x[i], x[i + 1])),
                    low_last = _mm256_castps_pd(_mm256_unpacklo_ps(x[i + 2], x[i + 3])),
                    high_last = _mm256_castps_pd(_mm256_unpackhi_ps(x[i + 2], x[i + 3]));
      four[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(low_first, low_last));
      four[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(low_first, low_last));
      four[i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(high_first, high_last));
      four[i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(high_first, high_last));
    }
    // Now four[4 * i + j] has columns j and 4 + j of rows 4 * i to 4 * i + 3.
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      x[j] = _mm256_permute2f128_ps(four[j], four[4 + j], 0x20);
      x[4 + j] = _mm256_permute2f128_ps(four[j], four[4 + j], 0x31);
    }
  }

  static F nearest(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F exp2(F x) {
    x = _mm256_min_ps(broadcast(256.0f), max(broadcast(-160.0f), x));
    const F whole = nearest(x);
    const F r = sub(x, whole);
    const F p = exp2_of_fraction<Simd>(r);
    // 2^whole in two factors, each of which is a normal number for all exponents that have a result.
    const __m256i exponent = _mm256_cvtps_epi32(whole);
    const __m256i low = _mm256_srai_epi32(exponent, 1), high = _mm256_sub_epi32(exponent, low);
    return mul(mul(p, power_of_two(low)), power_of_two(high));
  }
  static F mask_first(F x, int64_t n) {
    if (n <= 0) return x;
    const __m256i mask = first(static_cast<int>(smaller<int64_t>(n, kLanes)));
    return _mm256_blendv_ps(x, broadcast(-__builtin_inff()), _mm256_castsi256_ps(mask));
  }

  static F low_nibbles(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_and_si256(bytes(p), _mm256_set1_epi32(15)));
  }
  static F high_nibbles(const uint8_t* p) { return _mm256_cvtepi32_ps(_mm256_srli_epi32(bytes(p), 4)); }
  static F int8s(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }

  static F fours_of_halves(const uint8_t* p) {
    int32_t bits;
    std::memcpy(&bits, p, sizeof(bits));
    const __m128i spread = _mm_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3);
    return _mm256_cvtph_ps(_mm_shuffle_epi8(_mm_cvtsi32_si128(bits), spread));
  }
  static F scale_and_minimum(const uint8_t* p, const float* factor, Minimums& minimums) {
    return _mm256_broadcastss_ps(add_minimum(p, factor, minimums));
  }

 private:
  static __m256i first(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static F widen(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
  // Rounds to the nearest, ties to even: adds half of what is cut off, and a little less if the last bit is even. A NaN
  // is only cut off.
  static __m128i narrow(F x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i is_number = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_ORD_Q));
    const __m256i result = _mm256_add_epi32(bits, _mm256_and_si256(half, is_number));
    const __m256i high_halves =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(2, 3, 6, 7, 10, 11, 14, 15, -1, -1, -1, -1, -1, -1, -1, -1));
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_shuffle_epi8(result, high_halves), 0x08));
  }
  static __m256i bytes(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static F power_of_two(__m256i exponent) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23));
  }
};

}  // namespace
}  // namespace eqxcallback::cpu
