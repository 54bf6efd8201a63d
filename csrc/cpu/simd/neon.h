// Four lanes of f32 in NEON, as every 64-bit ARM processor has it. simd/portable.h says what each function means.
#pragma once

#include <arm_neon.h>

#include "cpu/simd/exp2.h"
#include "cpu/types.h"

namespace eqxcallback::cpu {
namespace {

struct Simd {
  static constexpr int kLanes = 4;
  static constexpr bool kFmaRoundsOnce = true;
  // Wide cores begin four multiplications in each cycle, which take four cycles: 16 sums do not wait for each other.
  // With more sums and what is loaded at a time, 32 registers are too few: g++ kept two sums of 6 x 4 in memory.
  static constexpr int kDotRows = 4, kDotColumns = 4;
  static constexpr int kOuterRows = 4, kOuterVectors = 4;

  using F = float32x4_t;

  static F zero() { return vdupq_n_f32(0); }
  static F broadcast(float value) { return vdupq_n_f32(value); }
  static F load(const float* p) { return vld1q_f32(p); }
  static F load(const Bf16* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits), 16)); }
  static F load(const F16* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))); }
  template <class T>
  static F load(const T* p, int n) {
    T lanes[kLanes] = {};
    copy_few(lanes, p, n);
    return load(lanes);
  }
  static void store(float* p, F x) { vst1q_f32(p, x); }
  static void store(Bf16* p, F x) { vst1_u16(&p->bits, narrow(x)); }
  static void store(F16* p, F x) { vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
  template <class T>
  static void store(T* p, F x, int n) {
    T lanes[kLanes];
    store(lanes, x);
    copy_few(p, lanes, n);
  }

  // These processors notice that whole lines are stored, and do not read the lines first.
  static void stream(float* p, F x) { store(p, x); }
  static void end_streams() {}

  static F add(F a, F b) { return vaddq_f32(a, b); }
  static F sub(F a, F b) { return vsubq_f32(a, b); }
  static F mul(F a, F b) { return vmulq_f32(a, b); }
  static F div(F a, F b) { return vdivq_f32(a, b); }
  static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
  static F max(F a, F b) { return vmaxq_f32(a, b); }
  static F min(F a, F b) { return vminq_f32(a, b); }
  static F abs(F x) { return vabsq_f32(x); }
  static bool any_less(F a, F b) { return vmaxvq_u32(vcltq_f32(a, b)) != 0; }
  static F select_less(F a, F b, F yes, F no) { return vbslq_f32(vcltq_f32(a, b), yes, no); }
  static F first_or(F x, int n, float other) { return vbslq_f32(first(n), x, broadcast(other)); }
  static float sum(F x) { return vaddvq_f32(x); }
  static float maximum(F x) { return vmaxvq_f32(x); }
  static F sums(const F* x) { return vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3])); }
  static void four_sums(float* out, F a, F b, F c, F d) { store(out, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d))); }

  static void transpose(F* x) {
    // Columns 0 and 2, and 1 and 3, of two rows.
    const float64x2_t even_first = vreinterpretq_f64_f32(vtrn1q_f32(x[0], x[1])),
                      odd_first = vreinterpretq_f64_f32(vtrn2q_f32(x[0], x[1])),
                      even_last = vreinterpretq_f64_f32(vtrn1q_f32(x[2], x[3])),
                      odd_last = vreinterpretq_f64_f32(vtrn2q_f32(x[2], x[3]));
    x[0] = vreinterpretq_f32_f64(vtrn1q_f64(even_first, even_last));
    x[1] = vreinterpretq_f32_f64(vtrn1q_f64(odd_first, odd_last));
    x[2] = vreinterpretq_f32_f64(vtrn2q_f64(even_first, even_last));
    x[3] = vreinterpretq_f32_f64(vtrn2q_f64(odd_first, odd_last));
  }

  static F nearest(F x) { return vrndnq_f32(x); }
  static F exp2(F x) {
    x = vminq_f32(broadcast(256.0f), max(broadcast(-160.0f), x));
    const F whole = nearest(x);
    const F p = exp2_of_fraction<Simd>(sub(x, whole));
    // 2^whole in two factors, each of which is a normal number for all exponents that have a result.
    const int32x4_t exponent = vcvtq_s32_f32(whole), low = vshrq_n_s32(exponent, 1);
    return mul(mul(p, power_of_two(low)), power_of_two(vsubq_s32(exponent, low)));
  }
  static F mask_first(F x, int64_t n) {
    if (n <= 0) return x;
    return vbslq_f32(first(static_cast<int>(smaller<int64_t>(n, kLanes))), broadcast(-__builtin_inff()), x);
  }

  static F low_nibbles(const uint8_t* p) { return vcvtq_f32_u32(vandq_u32(bytes(p), vdupq_n_u32(15))); }
  static F high_nibbles(const uint8_t* p) { return vcvtq_f32_u32(vshrq_n_u32(bytes(p), 4)); }
  static F int8s(const uint8_t* p) {
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four(p)))))));
  }

#ifdef __ARM_FEATURE_DOTPROD
  // Products of fours of signed bytes. The sums are integers.
  using Ints = int32_t __attribute__((vector_size(16)));
  static Ints fma(Ints a, Ints b, Ints c) {
    return reinterpret_cast<Ints>(
        vdotq_s32(reinterpret_cast<int32x4_t>(c), reinterpret_cast<int8x16_t>(a), reinterpret_cast<int8x16_t>(b)));
  }
#endif
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#define EQXCALLBACK_PAIRS
  // Pairs of bf16. The sum of both products, which are exact in f32, is rounded, and then the sum with c. Rounding
  // takes the neighbour whose last bit is 1, which is at most twice as far away as the nearest one, and as often above.
  static bfloat16x8_t load_pairs(const Bf16* p) { return vreinterpretq_bf16_u16(vld1q_u16(&p->bits)); }
  static bfloat16x8_t load_pairs(const Bf16* p, int n) {
    Bf16 pairs[2 * kLanes] = {};
    copy_few(pairs, p, n);
    return load_pairs(pairs);
  }
  static bfloat16x8_t broadcast_pair(const Bf16* p) {
    uint32_t bits;
    std::memcpy(&bits, p, sizeof(bits));
    return vreinterpretq_bf16_u32(vdupq_n_u32(bits));
  }
  static F fma(bfloat16x8_t a, bfloat16x8_t b, F c) { return vbfdotq_f32(c, a, b); }
  // A pair in each lane, of the numbers of two rows.
  static F pairs(const Bf16* first, const Bf16* second) {
    const uint16x4x2_t both = vzip_u16(vld1_u16(&first->bits), vld1_u16(&second->bits));
    return vreinterpretq_f32_u16(vcombine_u16(both.val[0], both.val[1]));
  }
#endif

  static float half(const uint8_t* p) {
    float16_t value;
    std::memcpy(&value, p, sizeof(value));
    return value;
  }
  static F fours_of_halves(const uint8_t* p) { return broadcast(half(p)); }
  using Minimums = float32x2_t;
  static Minimums no_minimums() { return vdup_n_f32(0); }
  static F scale_and_minimum(const uint8_t* p, const float* factor, Minimums& minimums) {
    const float32x2_t both = vget_low_f32(vcvt_f32_f16(vreinterpret_f16_u32(vdup_n_u32(four(p)))));
    minimums = vfma_f32(minimums, both, vld1_f32(factor));
    return vdupq_lane_f32(both, 0);
  }
  static float total(Minimums minimums) { return vget_lane_f32(minimums, 1); }

 private:
  // Copies n < 8 elements. The library's function, which a copy of a variable size calls, takes longer than the copy.
  template <class T>
  static void copy_few(T* to, const T* from, int n) {
    if ((n & 4) != 0) std::memcpy(to, from, 4 * sizeof(T));
    if ((n & 2) != 0) std::memcpy(to + (n & 4), from + (n & 4), 2 * sizeof(T));
    if ((n & 1) != 0) to[n & 6] = from[n & 6];
  }
  static uint32x4_t first(int n) {
    constexpr int32_t kLane[kLanes] = {0, 1, 2, 3};
    return vcltq_s32(vld1q_s32(kLane), vdupq_n_s32(n));
  }
  // Rounds to the nearest, ties to even.
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
  static uint16x4_t narrow(F x) { return vreinterpret_u16_bf16(vcvt_bf16_f32(x)); }
#else
  // Adds half of what is cut off, and a little less if the last bit is even. A NaN is only cut off.
  static uint16x4_t narrow(F x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t half = vaddq_u32(odd, vdupq_n_u32(0x7fff)), is_number = vceqq_f32(x, x);
    return vaddhn_u32(bits, vandq_u32(half, is_number));
  }
#endif
  static uint32_t four(const uint8_t* p) {
    uint32_t bits;
    std::memcpy(&bits, p, sizeof(bits));
    return bits;
  }
  static uint32x4_t bytes(const uint8_t* p) {
    return vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four(p))))));
  }
  static F power_of_two(int32x4_t exponent) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(exponent, vdupq_n_s32(127)), 23));
  }
};

}  // namespace
}  // namespace eqxcallback::cpu
