// SwiGLU (https://arxiv.org/abs/2002.05202): silu(gate) * up.
#pragma once

#include "cpu/kernels/common.h"

namespace eqxcallback::cpu {
namespace {

void swiglu(Element element, const SwiGlu& args, const Executor& executor) {
  with_type(element, [&](auto* type) {
    using T = Pointee<decltype(type)>;
    const double nanoseconds = static_cast<double>(args.size) * 0.25 + 5;
    parallel_for(executor, args.rows, nanoseconds, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* gate = static_cast<const T*>(args.gate) + r * args.stride;
        const T* up = static_cast<const T*>(args.up) + r * args.stride;
        T* out = static_cast<T*>(args.out) + r * args.size;
        for_vectors(args.size, [&](int64_t i, auto count) {
          const F g = load(gate + i, count);
          const F denominator = Simd::add(Simd::broadcast(1), Simd::exp2(Simd::mul(g, Simd::broadcast(-kLog2E))));
          store(out + i, Simd::mul(Simd::div(g, denominator), load(up + i, count)), count);
        });
      }
    });
  });
}

}  // namespace
}  // namespace eqxcallback::cpu
