// Cross-entropy of a softmax with integer labels. Logits are read once: the sum is relative to the maximum so far, and
// is scaled down when the maximum rises.
#pragma once

#include "cpu/kernels/math.h"
#include "cpu/kernels/streams.h"

namespace eqxcallback::cpu {
namespace {

// Up to here a product of a logit and log2(e) has an error below 1/8.
constexpr float kFar = 1 << 20;

// log(sum(exp(logits))) is highest + log_sum.
struct LogSum {
  float highest, log_sum;

  float total() const { return highest + log_sum; }
  bool is_near() const { return Simd::kFmaRoundsOnce && highest > -kFar && highest < kFar; }
};

// exp(z - base). Near zero, the difference and its factor log2(e) are one instruction, whose error is that of the
// base's product: a factor that all powers share.
template <bool kNear>
struct Powers {
  F base, shift;

  explicit Powers(F at) : base(at), shift(Simd::mul(at, Simd::broadcast(-kLog2E))) {}

  F operator()(F z) const {
    return kNear ? Simd::exp2(Simd::fma(z, Simd::broadcast(kLog2E), shift)) : exp(Simd::sub(z, base));
  }
  // What a sum of these powers is multiplied by for powers of `next`.
  F relative_to(const Powers& next) const {
    return kNear ? Simd::exp2(Simd::sub(next.shift, shift)) : exp(Simd::sub(base, next.base));
  }
  // exp(base - at), without the error of the base.
  F relative_to(float at) const {
    if (!kNear) return exp(Simd::sub(base, Simd::broadcast(at)));
    return Simd::exp2(Simd::sub(Simd::zero(), Simd::fma(Simd::broadcast(at), Simd::broadcast(kLog2E), shift)));
  }
};

// Each lane has a maximum of its own.
template <bool kNear, class T>
LogSum log_sum_with(const T* logits, int64_t size, const Prefetching& prefetching) {
  constexpr int kVectors = kLanes == 16 ? 8 : 4;  // AVX-512 has twice the registers
  Powers<kNear> powers(Simd::broadcast(kNear ? -kFar : kLowest));
  F sum[kVectors];
  for (F& x : sum) x = Simd::zero();
  const auto add = [&](int n, const F* z, auto count) __attribute__((always_inline)) {
    F top = z[0];
#pragma GCC unroll 8
    for (int v = 1; v < n; ++v) top = Simd::max(top, z[v]);
    if (Simd::any_less(powers.base, top)) {
      const Powers<kNear> next(Simd::max(powers.base, top));
      const F shrink = powers.relative_to(next);
      for (F& x : sum) x = Simd::mul(x, shrink);
      powers = next;
    }
#pragma GCC unroll 8
    for (int v = 0; v < n; ++v) sum[v] = Simd::add(sum[v], first_or(powers(z[v]), count, 0));
  };
  int64_t i = 0;
  for (; i + kVectors * kLanes <= size; i += kVectors * kLanes) {
    prefetch_one_stream(logits + i, kVectors * kLanes, prefetching);
    F z[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) z[v] = load(logits + i + v * kLanes, Full{});
    add(kVectors, z, Full{});
  }
  for_vectors(size - i, [&](int64_t j, auto count) {
    const F z = first_or(load(logits + i + j, count), count, kLowest);
    add(1, &z, count);
  });
  const float most = Simd::maximum(powers.base);
  F all = sum[0];
  for (int v = 1; v < kVectors; ++v) all = Simd::add(all, sum[v]);
  return {most, __builtin_logf(Simd::sum(Simd::mul(all, powers.relative_to(most))))};
}

template <class T>
LogSum log_sum_of(const T* logits, int64_t size, const Prefetching& prefetching) {
  if (Simd::kFmaRoundsOnce) {
    const LogSum near = log_sum_with<true>(logits, size, prefetching);
    if (near.is_near()) return near;
  }
  return log_sum_with<false>(logits, size, prefetching);
}

// Returns the label of a row, or -1 if it is out of range.
int64_t label_of(const CrossEntropy& args, int64_t row) {
  const int64_t label = args.labels[row], from_start = label < 0 ? label + args.size : label;
  return from_start >= 0 && from_start < args.size ? from_start : -1;
}
bool is_ignored(const CrossEntropy& args, int64_t row) {
  return args.has_ignore_index && args.labels[row] == args.ignore_index;
}

void cross_entropy(Element element, const CrossEntropy& args, const Executor& executor) {
  with_type(element, [&](auto* type) {
    using T = Pointee<decltype(type)>;
    const double nanoseconds = static_cast<double>(args.size) * 0.3 + 20;
    parallel_for(executor, args.rows, nanoseconds, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        if (is_ignored(args, r)) {
          args.loss[r] = 0;
          continue;
        }
        const T* logits = static_cast<const T*>(args.logits) + r * args.size;
        const LogSum softmax = log_sum_of(logits, args.size, args.prefetching);
        const int64_t label = label_of(args, r);
        // The maximum is subtracted first, as it may be so large that the logarithm would be lost in it.
        float loss = label < 0 ? __builtin_nanf("") : softmax.log_sum - (to_float(logits[label]) - softmax.highest);
        if (args.label_smoothing != 0) {
          const F shift = Simd::broadcast(softmax.highest);
          const float sum = sum_of(args.size, [&](F acc, int64_t i, auto count) {
            return Simd::add(acc, first_or(Simd::sub(load(logits + i, count), shift), count, 0));
          });
          const float mean = softmax.log_sum - sum / static_cast<float>(args.size);
          loss = (1 - args.label_smoothing) * loss + args.label_smoothing * mean;
        }
        if (args.z_loss != 0) loss += args.z_loss * softmax.total() * softmax.total();
        args.loss[r] = loss;
      }
    });
  });
}

// d loss / d z_i = (a + s + 2 c l) p_i - s / n, and at the label another - a, where l is the logarithm of the sum, s
// the smoothing, c the factor z_loss, and a the weight of the label: 1 - s, or 0 without a label.
template <bool kNear, class T, class Put>
void cross_entropy_gradients(Put put, const CrossEntropyBackward& args, int64_t r, int64_t label,
                             const LogSum& softmax) {
  const CrossEntropy& forward = args.forward;
  const int64_t size = forward.size;
  const T* logits = static_cast<const T*>(forward.logits) + r * size;
  T* dlogits = static_cast<T*>(args.dlogits) + r * size;
  const float smoothing = forward.label_smoothing, weight = label < 0 ? 0.0f : 1 - smoothing;
  const float upstream = args.dloss[r];
  const Powers<kNear> powers(Simd::broadcast(softmax.highest));
  const F sum = exp(Simd::broadcast(-softmax.log_sum)), exact = powers.relative_to(softmax.highest);
  const F factor = Simd::mul(Simd::broadcast(upstream * (weight + smoothing + 2 * forward.z_loss * softmax.total())),
                             Simd::mul(sum, exact));
  const F uniform = Simd::broadcast(-upstream * smoothing / static_cast<float>(size));
  const auto gradient = [&](F z) { return Simd::fma(powers(z), factor, uniform); };
  for_vectors(size, [&](int64_t i, auto count) {
    prefetch_one_stream(logits + i, kLanes, forward.prefetching);
    put(dlogits + i, gradient(load(logits + i, count)), count);
  });
  if (label >= 0) {
    // In f32, before the rounding.
    float all[kLanes];
    Simd::store(all, gradient(Simd::broadcast(to_float(logits[label]))));
    from_float(all[0] - upstream * weight, dlogits[label]);
  }
}

template <class T, class Put>
void cross_entropy_backward_row(Put put, const CrossEntropyBackward& args, int64_t r) {
  constexpr float kExact = 16.0f;  // a sum with it has an error of 1e-6
  const CrossEntropy& forward = args.forward;
  const int64_t size = forward.size, label = label_of(forward, r);
  const T* logits = static_cast<const T*>(forward.logits) + r * size;
  T* dlogits = static_cast<T*>(args.dlogits) + r * size;
  const bool plain = forward.label_smoothing == 0 && forward.z_loss == 0;
  if (is_ignored(forward, r) || (plain && label < 0)) {
    for_vectors(size, [&](int64_t i, auto count) { put(dlogits + i, Simd::zero(), count); });
    return;
  }
  LogSum softmax;
  if (plain && forward.loss[r] < kExact) {  // the loss of forward is all that is needed
    softmax = {to_float(logits[label]), forward.loss[r]};
  } else {
    softmax = log_sum_of(logits, size, forward.prefetching);
  }
  if (softmax.is_near()) {
    cross_entropy_gradients<true, T>(put, args, r, label, softmax);
  } else {
    cross_entropy_gradients<false, T>(put, args, r, label, softmax);
  }
}

void cross_entropy_backward(Element element, const CrossEntropyBackward& args, const Executor& executor) {
  with_type(element, [&](auto* type) {
    using T = Pointee<decltype(type)>;
    const int64_t rows = args.forward.rows, size = args.forward.size;
    const double nanoseconds = static_cast<double>(size) * 0.4 + 20;
    const bool streams = exceeds_caches<T>(2 * rows * size, size, args.dlogits);
    parallel_for(executor, rows, nanoseconds, [&](int64_t begin, int64_t end) {
      with_stores<T>(streams, [&](auto put) {
        for (int64_t r = begin; r < end; ++r) cross_entropy_backward_row<T>(put, args, r);
      });
    });
  });
}

}  // namespace
}  // namespace eqxcallback::cpu
