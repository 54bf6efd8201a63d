// Four lanes of f32 in plain C++. What each instruction set defines is listed and explained here.
#pragma once

#include "cpu/types.h"

namespace eqxcallback::cpu {
namespace {

struct Simd {
  static constexpr int kLanes = 4;
  // Tiles that fill the registers. Dot products: kDotRows * kDotColumns == kLanes sums. Outer products: rows x vectors.
  static constexpr int kDotRows = 2, kDotColumns = 2;
  static constexpr int kOuterRows = 2, kOuterVectors = 2;

  struct F {
    float lane[kLanes];
  };

  template <class Fn>
  static F map(Fn fn) {
    F result;
    for (int i = 0; i < kLanes; ++i) result.lane[i] = fn(i);
    return result;
  }

  static F zero() { return broadcast(0); }
  static F broadcast(float value) {
    return map([&](int) { return value; });
  }
  template <class T>
  static F load(const T* p) {
    return map([&](int i) { return to_float(p[i]); });
  }
  template <class T>
  static void store(T* p, F x) {
    for (int i = 0; i < kLanes; ++i) from_float(x.lane[i], p[i]);
  }
  // The first n lanes; the others are zero, and are not touched in memory.
  template <class T>
  static F load(const T* p, int n) {
    return map([&](int i) { return i < n ? to_float(p[i]) : 0.0f; });
  }
  template <class T>
  static void store(T* p, F x, int n) {
    for (int i = 0; i < n; ++i) from_float(x.lane[i], p[i]);
  }

  static F add(F a, F b) {
    return map([&](int i) { return a.lane[i] + b.lane[i]; });
  }
  static F sub(F a, F b) {
    return map([&](int i) { return a.lane[i] - b.lane[i]; });
  }
  static F mul(F a, F b) {
    return map([&](int i) { return a.lane[i] * b.lane[i]; });
  }
  static F div(F a, F b) {
    return map([&](int i) { return a.lane[i] / b.lane[i]; });
  }
  // a * b + c
  static F fma(F a, F b, F c) {
    return map([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
  }
  // A NaN in b goes through.
  static F max(F a, F b) {
    return map([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  static float sum(F x) { return (x.lane[0] + x.lane[2]) + (x.lane[1] + x.lane[3]); }
  static float maximum(F x) { return larger(larger(x.lane[0], x.lane[1]), larger(x.lane[2], x.lane[3])); }
  // Lane i of the result is the sum of x[i]: kLanes vectors.
  static F sums(const F* x) {
    return map([&](int i) { return sum(x[i]); });
  }
  // 2^x, zero below -150
  static F exp2(F x) {
    return map([&](int i) { return x.lane[i] < -150.0f ? 0.0f : __builtin_exp2f(x.lane[i]); });
  }
  // The first n lanes become -inf.
  static F mask_first(F x, int64_t n) {
    return map([&](int i) { return i < n ? -__builtin_inff() : x.lane[i]; });
  }

  // From kLanes bytes each.
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
    uint16_t bits;
    std::memcpy(&bits, p, sizeof(bits));
    const float sign = (bits & 0x8000) != 0 ? -1.0f : 1.0f;
    const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
    if (exponent == 31) return fraction != 0 ? __builtin_nanf("") : sign * __builtin_inff();
    const float value = static_cast<float>(exponent == 0 ? fraction : fraction | 1024);
    return sign * __builtin_ldexpf(value, larger(exponent, 1) - 25);
  }
  // A scale and a minimum, in halves: the scale in all lanes; minimum * factor is added to `minimums`. `factor` is a
  // pair {0, factor}, so that wide registers need not move anything.
  using Minimums = float;
  static Minimums no_minimums() { return 0; }
  static F scale_and_minimum(const uint8_t* p, const float* factor, Minimums& minimums) {
    minimums += half(p + 2) * factor[1];
    return broadcast(half(p));
  }
  static float total(Minimums minimums) { return minimums; }
};

}  // namespace
}  // namespace eqxcallback::cpu
