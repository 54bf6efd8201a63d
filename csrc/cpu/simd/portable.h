// Four lanes of f32 for any CPU. This file lists and explains the functions that each instruction set defines.
#pragma once

#include "cpu/simd/exp2.h"
#include "cpu/types.h"

namespace eqxcallback::cpu {
namespace {

struct Simd {
  static constexpr int kLanes = 4;
  // Whether `fma` rounds once, for certain.
  static constexpr bool kFmaRoundsOnce = false;
  // Tiles that fill the registers. Dot products: kDotRows * kDotColumns sums, a multiple of kLanes. Outer products:
  // rows x vectors.
  static constexpr int kDotRows = 2, kDotColumns = 2;
  static constexpr int kOuterRows = 2, kOuterVectors = 2;

  // A vector of four lanes: g++ and clang know such vectors on every CPU.
  using F = float __attribute__((vector_size(16)));

  template <class Fn>
  static F map(const Fn& fn) {
    return F{fn(0), fn(1), fn(2), fn(3)};
  }

  static F zero() { return F{}; }
  static F broadcast(float value) { return F{value, value, value, value}; }
  template <class T>
  static F load(const T* p) {
    return map([&](int i) { return to_float(p[i]); });
  }
  // Rounds to 16 bits, to the nearest, ties to even. A quiet NaN stays a NaN, and arithmetic makes no others.
  template <class T>
  static void store(T* p, F x) {
    for (int i = 0; i < kLanes; ++i) from_float(x[i], p[i]);
  }
  // Loads the first n lanes. The others are zero, and are not touched in memory.
  template <class T>
  static F load(const T* p, int n) {
    return map([&](int i) { return i < n ? to_float(p[i]) : 0.0f; });
  }
  template <class T>
  static void store(T* p, F x, int n) {
    for (int i = 0; i < n; ++i) from_float(x[i], p[i]);
  }
  // Stores past the caches, to an address that is a multiple of the vector's size. Other threads see it after
  // `end_streams`.
  static void stream(float* p, F x) { store(p, x); }
  static void end_streams() {}

  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  // a * b + c
  static F fma(F a, F b, F c) { return a * b + c; }
  // Returns NaN if b is NaN.
  static F max(F a, F b) { return a > b ? a : b; }
  static F min(F a, F b) { return a < b ? a : b; }
  static F abs(F x) { return reinterpret_cast<F>(reinterpret_cast<I>(x) & 0x7fffffff); }
  static bool any_less(F a, F b) { return a[0] < b[0] || a[1] < b[1] || a[2] < b[2] || a[3] < b[3]; }
  // Takes `yes` in the lanes where a < b, else `no`.
  static F select_less(F a, F b, F yes, F no) { return a < b ? yes : no; }
  // The lanes from n on become `other`.
  static F first_or(F x, int n, float other) { return kLane < n ? x : broadcast(other); }
  static float sum(F x) { return (x[0] + x[2]) + (x[1] + x[3]); }
  static float maximum(F x) { return larger(larger(x[0], x[1]), larger(x[2], x[3])); }
  // Lane i of the result is the sum of x[i]: kLanes vectors.
  static F sums(const F* x) {
    return map([&](int i) { return sum(x[i]); });
  }
  // Puts the sums of four vectors into out[0] to out[3].
  static void four_sums(float* out, F a, F b, F c, F d) { store(out, F{sum(a), sum(b), sum(c), sum(d)}); }
  // Lane j of vector i and lane i of vector j change places: kLanes vectors.
  static void transpose(F* x) {
    const F rows[kLanes] = {x[0], x[1], x[2], x[3]};
    for (int j = 0; j < kLanes; ++j) x[j] = map([&](int i) { return rows[i][j]; });
  }
  // Rounds to integers, to the nearest, ties to even. Not by adding 1.5 * 2^23, which a compiler may join with a
  // product before it.
  static F nearest(F x) {
    return map([&](int i) { return __builtin_rintf(x[i]); });
  }
  // 2^x, zero below -150
  static F exp2(F x) {
    x = min(broadcast(256.0f), max(broadcast(-160.0f), x));
    constexpr float kNoFraction = 0x1.8p23f;  // a number of this size has no bits for a fraction
    const F whole = (x + kNoFraction) - kNoFraction;
    const F p = exp2_of_fraction<Simd>(x - whole);
    // 2^whole in two factors, each of which is a normal number for all exponents that have a result.
    const I exponent = __builtin_convertvector(whole, I), low = exponent >> 1;
    return p * power_of_two(low) * power_of_two(exponent - low);
  }
  // The first n lanes become -inf.
  static F mask_first(F x, int64_t n) {
    return kLane < static_cast<int32_t>(smaller<int64_t>(n, kLanes)) ? broadcast(-__builtin_inff()) : x;
  }

  // These functions read kLanes bytes.
  static F low_nibbles(const uint8_t* p) {
    return map([&](int i) { return static_cast<float>(p[i] & 15); });
  }
  static F high_nibbles(const uint8_t* p) {
    return map([&](int i) { return static_cast<float>(p[i] >> 4); });
  }
  static F int8s(const uint8_t* p) {
    return map([&](int i) { return static_cast<float>(static_cast<int8_t>(p[i])); });
  }

  static float half(const uint8_t* p) {
    F16 value;
    std::memcpy(&value, p, sizeof(value));
    return to_float(value);
  }
  // kLanes / 4 halves, each in four lanes side by side.
  static F fours_of_halves(const uint8_t* p) { return broadcast(half(p)); }
  // A scale and a minimum, in halves: the scale in all lanes; minimum * factor is added to `minimums`. `factor` is a
  // pair {0, factor}, so that wide registers need not move anything.
  using Minimums = float;
  static Minimums no_minimums() { return 0; }
  static F scale_and_minimum(const uint8_t* p, const float* factor, Minimums& minimums) {
    minimums += half(p + 2) * factor[1];
    return broadcast(half(p));
  }
  static float total(Minimums minimums) { return minimums; }

 private:
  using I = int32_t __attribute__((vector_size(16)));
  static constexpr I kLane = {0, 1, 2, 3};

  static F power_of_two(I exponent) { return reinterpret_cast<F>((exponent + 127) << 23); }
};

}  // namespace
}  // namespace eqxcallback::cpu
