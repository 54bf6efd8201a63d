// RMS norm (https://arxiv.org/abs/1910.07467), layer norm (https://arxiv.org/abs/1607.06450) and group norm
// (https://arxiv.org/abs/1803.08494): one row at a time, read from memory once, and then from cache.
#pragma once

#include "cpu/kernels/streams.h"

namespace eqxcallback::cpu {
namespace {

// A row x is (x * scale - mean) * inverse when it is normalised. `scale` is 1 unless the squares of x overflow.
struct Moments {
  float scale, mean, inverse;

  // Normalises a vector of x.
  template <bool kCenter>
  F normalize(F x) const {
    if constexpr (kCenter) {
      return Simd::mul(Simd::fma(x, Simd::broadcast(scale), Simd::broadcast(-mean)), Simd::broadcast(inverse));
    } else {
      // Not by the product of both factors, which may be subnormal.
      return Simd::mul(Simd::mul(x, Simd::broadcast(scale)), Simd::broadcast(inverse));
    }
  }
};

template <bool kCenter, class T>
Moments moments_of(const T* x, int64_t size, float eps) {
  const auto n = static_cast<float>(size);
  if constexpr (kCenter) {
    const auto [sum, sum_of_squares] = sums_of(size, [&](VectorPair acc, int64_t i, auto count) {
      const F v = load(x + i, count);
      return VectorPair{Simd::add(acc.first, v), Simd::fma(v, v, acc.second)};
    });
    const float mean = sum / n, squares = sum_of_squares / n;
    const float variance = squares - mean * mean;
    // If little is left of the squares, or they overflow, a second pass is more precise.
    if (variance >= squares * 0.25f && squares < __builtin_inff()) {
      return {1, mean, 1.0f / __builtin_sqrtf(variance + eps)};
    }
  }
  float variance = 0;
  const auto scaled_by = [&](float scale) {
    const F factor = Simd::broadcast(scale);
    float mean = 0;
    if constexpr (kCenter) {
      mean = sum_of(size, [&](F acc, int64_t i, auto count) { return Simd::fma(load(x + i, count), factor, acc); }) / n;
    }
    const F shift = Simd::broadcast(-mean);
    variance = sum_of(size,
                      [&](F acc, int64_t i, auto count) {
                        F v = Simd::fma(load(x + i, count), factor, shift);
                        if constexpr (kCenter) v = first_or(v, count, 0);
                        return Simd::fma(v, v, acc);
                      }) /
               n;
    // A row of one large value leaves nothing: the root must not be that of zero.
    const float small = scale == 1 ? eps : larger(eps * scale * scale, 0x1p-126f);
    return Moments{scale, mean, 1.0f / __builtin_sqrtf(variance + small)};
  };
  const Moments result = scaled_by(1);
  if (variance < __builtin_inff()) return result;
  const float highest = Simd::maximum(fold(
      size, Simd::zero(), [&](F acc, int64_t i, auto count) { return Simd::max(acc, Simd::abs(load(x + i, count))); },
      Simd::max));
  // If an element is infinite or NaN, so is the result.
  if (!(highest < __builtin_inff())) return result;
  return scaled_by(0x1p-90f);  // from 2^50 and more to between 2^-40 and 2^38
}

template <bool kCenter, class T, class Put>
void normalize_row(Put put, T* out, const T* x, const float* weight, const float* bias, int64_t size, Moments moments) {
  for_vectors(size, [&](int64_t i, auto count) {
    prefetch(x + size + i, kLanes);  // the next row
    F v = moments.normalize<kCenter>(load(x + i, count));
    if (weight != nullptr) v = Simd::mul(v, load(weight + i, count));
    if (bias != nullptr) v = Simd::add(v, load(bias + i, count));
    put(out + i, v, count);
  });
}

template <bool kCenter, class T>
void norm_as(const Norm& args, const Executor& executor) {
  // True if the moments of a row are computed before the previous row is written, which takes as long as the roots and
  // quotients of the moments. Rows of f32, which wait for memory, are slower so.
  constexpr bool kAhead = sizeof(T) == 2;
  const double nanoseconds = static_cast<double>(args.size) * 0.1 + 5;
  const bool streams = exceeds_caches<T>(2 * args.rows * args.size, args.size, args.out);
  parallel_for(executor, args.rows, nanoseconds, [&](int64_t begin, int64_t end) {
    with_stores<T>(streams, [&](auto put) {
      const T* x = static_cast<const T*>(args.x) + begin * args.size;
      T* out = static_cast<T*>(args.out) + begin * args.size;
      const auto moments_at = [&](const T* row) { return moments_of<kCenter>(row, args.size, args.eps); };
      Moments next = moments_at(x);
      for (int64_t r = begin; r < end; ++r, x += args.size, out += args.size) {
        const Moments moments = next;
        if (kAhead && r + 1 < end) next = moments_at(x + args.size);
        normalize_row<kCenter>(put, out, x, args.weight, args.bias, args.size, moments);
        if (!kAhead && r + 1 < end) next = moments_at(x + args.size);
      }
    });
  });
}

void norm(Element element, const Norm& args, const Executor& executor) {
  with_type(element, [&](auto* type) {
    using T = Pointee<decltype(type)>;
    args.center ? norm_as<true, T>(args, executor) : norm_as<false, T>(args, executor);
  });
}

void group_norm(Element element, const GroupNorm& args, const Executor& executor) {
  with_type(element, [&](auto* type) {
    using T = Pointee<decltype(type)>;
    const int64_t channels = args.channels / args.groups, length = channels * args.size;
    const double nanoseconds = static_cast<double>(length) * 0.1 + 5;
    parallel_for(executor, args.batch * args.groups, nanoseconds, [&](int64_t begin, int64_t end) {
      for (int64_t g = begin; g < end; ++g) {
        const T* x = static_cast<const T*>(args.x) + g * length;
        T* out = static_cast<T*>(args.out) + g * length;
        const Moments moments = moments_of<true>(x, length, args.eps);
        const int64_t first = g % args.groups * channels;
        const float* weight = args.weight == nullptr ? nullptr : args.weight + first;
        const float* bias = args.bias == nullptr ? nullptr : args.bias + first;
        if (args.size == 1) {
          normalize_row<true>(Store{}, out, x, weight, bias, channels, moments);
          continue;
        }
        for (int64_t c = 0; c < channels; ++c) {
          const F factor = Simd::broadcast(weight == nullptr ? 1.0f : weight[c]);
          const F shift = Simd::broadcast(bias == nullptr ? 0.0f : bias[c]);
          for_vectors(args.size, [&](int64_t i, auto count) {
            const F v = moments.normalize<true>(load(x + c * args.size + i, count));
            store(out + c * args.size + i, Simd::fma(v, factor, shift), count);
          });
        }
      }
    });
  });
}

void add_rms_norm(Element element, const AddRmsNorm& args, const Executor& executor) {
  with_type(element, [&](auto* type) {
    using T = Pointee<decltype(type)>;
    const double nanoseconds = static_cast<double>(args.size) * 0.15 + 5;
    parallel_for(executor, args.rows, nanoseconds, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* x = static_cast<const T*>(args.x) + r * args.size;
        const T* residual = static_cast<const T*>(args.residual) + r * args.size;
        T* sum = static_cast<T*>(args.sum) + r * args.size;  // perhaps the memory of residual
        for_vectors(args.size, [&](int64_t i, auto count) {
          store(sum + i, Simd::add(load(x + i, count), load(residual + i, count)), count);
        });
        normalize_row<false>(Store{}, static_cast<T*>(args.out) + r * args.size, sum, args.weight, nullptr, args.size,
                             moments_of<false>(sum, args.size, args.eps));
      }
    });
  });
}

}  // namespace
}  // namespace eqxcallback::cpu
