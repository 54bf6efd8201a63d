// The activations of feed-forward blocks, and their slopes.
#pragma once

#include "cpu/kernels/math.h"

namespace eqxcallback::cpu {
namespace {

struct Slope {
  F value, slope;
};

// x sigmoid(x)
struct Silu {
  static F value(F x) {
    return Simd::div(x, Simd::add(Simd::broadcast(1), Simd::exp2(Simd::mul(x, Simd::broadcast(-kLog2E)))));
  }
  static Slope with_slope(F x) {
    const F s = sigmoid(x), value = Simd::mul(x, s);
    return {value, Simd::fma(value, Simd::sub(Simd::broadcast(1), s), s)};
  }
};

// x (1 + tanh u) / 2 = x / (1 + e^(-2 u)), with u = sqrt(2 / pi) (x + 0.044715 x^3). Beyond 16 that is x or 0.
struct TanhGelu {
  static constexpr float kLinear = 1.595769122f, kCubic = 0.0713548163f;  // of 2 u

  // 1 + e^(-2 u)
  static F denominator(F x) {
    const F factor = Simd::fma(Simd::mul(x, x), Simd::broadcast(-kLog2E * kCubic), Simd::broadcast(-kLog2E * kLinear));
    return Simd::add(Simd::broadcast(1), Simd::exp2(Simd::mul(x, factor)));
  }
  static F value(F x) { return Simd::div(x, denominator(clamp(x, 16))); }
  static Slope with_slope(F x) {
    const F c = clamp(x, 16), s = Simd::div(Simd::broadcast(1), denominator(c));
    const F inner = Simd::fma(Simd::mul(c, c), Simd::broadcast(3 * kCubic), Simd::broadcast(kLinear));
    const F rest = Simd::mul(Simd::mul(c, s), Simd::sub(Simd::broadcast(1), s));
    return {Simd::mul(x, s), Simd::fma(rest, inner, s)};
  }
};

// x Phi(x), where Phi is 0 or 1 beyond 16.
struct ExactGelu {
  static F value(F x) { return Simd::mul(x, Normal(clamp(x, 16)).below); }
  static Slope with_slope(F x) {
    const F c = clamp(x, 16);
    const Normal normal(c);
    const F density = Simd::mul(normal.density, Simd::broadcast(0.398942280f));
    return {Simd::mul(x, normal.below), Simd::fma(c, density, normal.below)};
  }
};

// Calls fn with the element's type and the activation.
template <class Fn>
void with_activation(Element element, Activation activation, const Fn& fn) {
  with_type(element, [&](auto* type) {
    if (activation == Activation::kSilu) {
      fn(type, Silu{});
    } else if (activation == Activation::kGelu) {
      fn(type, ExactGelu{});
    } else {
      fn(type, TanhGelu{});
    }
  });
}

}  // namespace
}  // namespace eqxcallback::cpu
