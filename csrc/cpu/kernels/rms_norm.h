// RMS norm (https://arxiv.org/abs/1910.07467): one row at a time, read twice, the second time from cache.
#pragma once

#include "cpu/kernels/common.h"

namespace eqxcallback::cpu {
namespace {

template <class T>
void rms_norm_row(T* out, const T* x, const float* weight, int64_t size, float eps) {
  F squares[2] = {Simd::zero(), Simd::zero()};  // two chains: one alone waits for itself
  int chain = 0;
  for_vectors(size, [&](int64_t i, auto count) {
    const F v = load(x + i, count);
    squares[chain] = Simd::fma(v, v, squares[chain]);
    chain ^= 1;
  });
  const float mean = Simd::sum(Simd::add(squares[0], squares[1])) / static_cast<float>(size);
  const F inverse = Simd::broadcast(1.0f / __builtin_sqrtf(mean + eps));
  for_vectors(size, [&](int64_t i, auto count) {
    F v = Simd::mul(load(x + i, count), inverse);
    if (weight != nullptr) v = Simd::mul(v, load(weight + i, count));
    store(out + i, v, count);
  });
}

void rms_norm(Element element, const RmsNorm& args, const Executor& executor) {
  with_type(element, [&](auto* type) {
    using T = Pointee<decltype(type)>;
    const double nanoseconds = static_cast<double>(args.size) * 0.1 + 5;
    parallel_for(executor, args.rows, nanoseconds, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        rms_norm_row(static_cast<T*>(args.out) + r * args.size, static_cast<const T*>(args.x) + r * args.size,
                     args.weight, args.size, args.eps);
      }
    });
  });
}

}  // namespace
}  // namespace eqxcallback::cpu
