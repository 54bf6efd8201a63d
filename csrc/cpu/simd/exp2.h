// The part of `exp2` that all instruction sets share.
#pragma once

namespace eqxcallback::cpu {
namespace {

// 2^r for r in [-1/2, 1/2], with a relative error of 2e-7.
template <class S, class F = decltype(S::zero())>
F exp2_of_fraction(F r) {
  F p = S::broadcast(1.326471465e-3f);
  p = S::fma(p, r, S::broadcast(9.671513544e-3f));
  p = S::fma(p, r, S::broadcast(5.550733785e-2f));
  p = S::fma(p, r, S::broadcast(2.402224207e-1f));
  p = S::fma(p, r, S::broadcast(6.931469776e-1f));
  return S::fma(p, r, S::broadcast(1.0f));
}

}  // namespace
}  // namespace eqxcallback::cpu
