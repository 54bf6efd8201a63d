// GELU (https://arxiv.org/abs/1606.08415) of each element, and the gradient.
#pragma once

#include "cpu/kernels/activations.h"
#include "cpu/kernels/streams.h"

namespace eqxcallback::cpu {
namespace {

// Calls fn(i, count, put) for the vectors of `size` elements, which threads share in runs of whole vectors.
template <class T, class Fn>
void for_shared_vectors(int64_t size, double nanoseconds, bool streams, const Executor& executor, const Fn& fn) {
  constexpr int64_t kRun = 1024;
  parallel_for(executor, (size + kRun - 1) / kRun, nanoseconds * kRun, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kRun, last = end * kRun < size ? end * kRun : size;
    with_stores<T>(streams, [&](auto put) {
      for_vectors(last - first, [&](int64_t i, auto count) { fn(first + i, count, put); });
    });
  });
}

void gelu(Element element, const Gelu& args, const Executor& executor) {
  with_activation(element, args.activation, [&](auto* type, auto activation) {
    using T = Pointee<decltype(type)>;
    const auto* x = static_cast<const T*>(args.x);
    auto* out = static_cast<T*>(args.out);
    const bool streams = exceeds_caches<T>(2 * args.size, kLanes, args.out);
    for_shared_vectors<T>(args.size, 0.25, streams, executor, [&](int64_t i, auto count, auto put) {
      put(out + i, activation.value(load(x + i, count)), count);
    });
  });
}

void gelu_backward(Element element, const GeluBackward& args, const Executor& executor) {
  with_activation(element, args.activation, [&](auto* type, auto activation) {
    using T = Pointee<decltype(type)>;
    const auto *x = static_cast<const T*>(args.x), *dout = static_cast<const T*>(args.dout);
    auto* dx = static_cast<T*>(args.dx);
    const bool streams = exceeds_caches<T>(3 * args.size, kLanes, args.dx);
    for_shared_vectors<T>(args.size, 0.4, streams, executor, [&](int64_t i, auto count, auto put) {
      put(dx + i, Simd::mul(load(dout + i, count), activation.with_slope(load(x + i, count)).slope), count);
    });
  });
}

}  // namespace
}  // namespace eqxcallback::cpu
