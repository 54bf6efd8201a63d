// Gated linear units (https://arxiv.org/abs/2002.05202): activation(gate) * up, and the gradients.
#pragma once

#include "cpu/kernels/math.h"
#include "cpu/kernels/streams.h"

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
struct GeluTanh {
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
struct Gelu {
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
      fn(type, Gelu{});
    } else {
      fn(type, GeluTanh{});
    }
  });
}

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
