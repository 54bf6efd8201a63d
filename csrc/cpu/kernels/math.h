// Functions of a vector that instruction sets lack. Each is within a few units of f32's last place, and gives NaN for
// NaN.
#pragma once

#include "cpu/kernels/common.h"

namespace eqxcallback::cpu {
namespace {

F clamp(F x, float limit) { return Simd::min(Simd::broadcast(limit), Simd::max(Simd::broadcast(-limit), x)); }

F exp(F x) { return Simd::exp2(Simd::mul(x, Simd::broadcast(kLog2E))); }

// 1 / (1 + e^-x)
F sigmoid(F x) {
  const F one = Simd::broadcast(1);
  return Simd::div(one, Simd::add(one, Simd::exp2(Simd::mul(x, Simd::broadcast(-kLog2E)))));
}

// Evaluates a polynomial with the coefficients c, that of the highest power first.
template <size_t n>
F polynomial(F x, const float (&c)[n]) {
  F result = Simd::broadcast(c[0]);
#pragma GCC unroll 16
  for (size_t i = 1; i < n; ++i) result = Simd::fma(result, x, Simd::broadcast(c[i]));
  return result;
}

// 1 - 2 / (e^2|x| + 1), or an odd polynomial near zero, where that difference cancels.
F tanh(F x) {
  constexpr float kOdd[] = {-5.660754948e-03f, 2.060197360e-02f, -5.372921812e-02f, 1.333132879e-01f,
                            -3.333327831e-01f};
  const F size = Simd::abs(x), one = Simd::broadcast(1), square = Simd::mul(x, x);
  const F near = Simd::fma(Simd::mul(x, square), polynomial(square, kOdd), x);
  const F power = exp(Simd::min(Simd::broadcast(40), Simd::add(size, size)));
  const F far = Simd::sub(one, Simd::div(Simd::broadcast(2), Simd::add(power, one)));
  const F with_sign = Simd::select_less(x, Simd::zero(), Simd::sub(Simd::zero(), far), far);
  return Simd::select_less(size, Simd::broadcast(0.6f), near, with_sign);
}

// The distribution function of the normal distribution, and e^(-x^2 / 2). From erfc(a) e^(a^2) / 2, which is
// nearly a polynomial in t = 1 / (1 + 0.4 a), of a = |x| / sqrt(2).
struct Normal {
  F below, density;

  explicit Normal(F x) {
    constexpr float kScaled[] = {-1.479770429e-02f, 9.900937974e-02f, -2.494119257e-01f, 2.737254798e-01f,
                                 -1.421894133e-01f, 1.360361725e-01f, 6.483881921e-02f,  1.074597463e-01f,
                                 1.124759912e-01f,  1.128534526e-01f};
    const F one = Simd::broadcast(1);
    const F t = Simd::div(one, Simd::fma(Simd::abs(x), Simd::broadcast(0.282842712f), one));
    density = Simd::exp2(Simd::mul(Simd::mul(x, x), Simd::broadcast(-0.5f * kLog2E)));
    const F tail = Simd::mul(Simd::mul(polynomial(t, kScaled), t), density);
    below = Simd::select_less(x, Simd::zero(), tail, Simd::sub(one, tail));
  }
};

}  // namespace
}  // namespace eqxcallback::cpu
