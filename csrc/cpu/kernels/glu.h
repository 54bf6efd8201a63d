// Gated linear units (https://arxiv.org/abs/2002.05202): activation(gate) * up, and the gradients.
#pragma once

#include "cpu/kernels/activations.h"
#include "cpu/kernels/streams.h"

namespace eqxcallback::cpu {
namespace {

void glu(Element element, const Glu& args, const Executor& executor) {
  with_activation(element, args.activation, [&](auto* type, auto activation) {
    using T = Pointee<decltype(type)>;
    const double nanoseconds = static_cast<double>(args.size) * 0.25 + 5;
    const bool streams = exceeds_caches<T>(3 * args.rows * args.size, args.size, args.out);
    parallel_for(executor, args.rows, nanoseconds, [&](int64_t begin, int64_t end) {
      with_stores<T>(streams, [&](auto put) {
        for (int64_t r = begin; r < end; ++r) {
          const T* gate = static_cast<const T*>(args.gate) + r * args.stride;
          const T* up = static_cast<const T*>(args.up) + r * args.stride;
          T* out = static_cast<T*>(args.out) + r * args.size;
          for_vectors(args.size, [&](int64_t i, auto count) {
            put(out + i, Simd::mul(activation.value(load(gate + i, count)), load(up + i, count)), count);
          });
        }
      });
    });
  });
}

template <bool kGate, bool kUp>
void glu_backward_of(Element element, const GluBackward& args, const Executor& executor) {
  with_activation(element, args.activation, [&](auto* type, auto activation) {
    using T = Pointee<decltype(type)>;
    const double nanoseconds = static_cast<double>(args.size) * 0.4 + 5;
    const bool streams = exceeds_caches<T>(5 * args.rows * args.size, args.size, args.dgate, args.dup);
    parallel_for(executor, args.rows, nanoseconds, [&](int64_t begin, int64_t end) {
      with_stores<T>(streams, [&](auto put) {
        for (int64_t r = begin; r < end; ++r) {
          const T* gate = static_cast<const T*>(args.gate) + r * args.stride;
          const T* up = static_cast<const T*>(args.up) + r * args.stride;
          const T* dout = static_cast<const T*>(args.dout) + r * args.size;
          T *dgate = static_cast<T*>(args.dgate), *dup = static_cast<T*>(args.dup);
          if constexpr (kGate) dgate += r * args.stride;
          if constexpr (kUp) dup += r * args.stride;
          for_vectors(args.size, [&](int64_t i, auto count) {
            const Slope of_gate = activation.with_slope(load(gate + i, count));
            const F upstream = load(dout + i, count);
            if constexpr (kGate) {
              put(dgate + i, Simd::mul(Simd::mul(upstream, load(up + i, count)), of_gate.slope), count);
            }
            if constexpr (kUp) put(dup + i, Simd::mul(upstream, of_gate.value), count);
          });
        }
      });
    });
  });
}

void glu_backward(Element element, const GluBackward& args, const Executor& executor) {
  if (args.dgate != nullptr) {
    args.dup != nullptr ? glu_backward_of<true, true>(element, args, executor)
                        : glu_backward_of<true, false>(element, args, executor);
  } else if (args.dup != nullptr) {
    glu_backward_of<false, true>(element, args, executor);
  }
}

}  // namespace
}  // namespace eqxcallback::cpu
