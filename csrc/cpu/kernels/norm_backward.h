// The gradients of RMS norm, layer norm and group norm. With g = dout * weight and y the normalised row,
// dx = inverse * (g - mean(g) - y * mean(g * y)), where RMS norm has no mean of g; dweight = sum(dout * y) and
// dbias = sum(dout) over the rows.
#pragma once

#include "cpu/kernels/norm.h"
#include "cpu/kernels/row_sums.h"

namespace eqxcallback::cpu {
namespace {

// Adds to `dweight` and `dbias`. Any of the three gradients may be null.
template <bool kCenter, class T, class Put>
void norm_backward_row(Put put, T* dx, const T* x, const T* dout, const float* weight, float* dweight, float* dbias,
                       int64_t size, float eps) {
  const Moments moments = moments_of<kCenter>(x, size, eps);
  const auto add_to_parameters = [&](int64_t i, auto count, F upstream, F y) {
    if (dweight != nullptr) store(dweight + i, Simd::fma(upstream, y, load(dweight + i, count)), count);
    if (dbias != nullptr) store(dbias + i, Simd::add(upstream, load(dbias + i, count)), count);
  };
  if (dx == nullptr) {
    for_vectors(size, [&](int64_t i, auto count) {
      add_to_parameters(i, count, load(dout + i, count), moments.normalize<kCenter>(load(x + i, count)));
    });
    return;
  }
  const auto gradient = [&](F upstream, int64_t i, auto count) {
    return weight == nullptr ? upstream : Simd::mul(upstream, load(weight + i, count));
  };
  const auto [total, slope] = sums_of(size, [&](VectorPair acc, int64_t i, auto count) {
    const F g = gradient(load(dout + i, count), i, count);
    // Lanes that do not count are zero in g, but y may be infinite there.
    const F y = first_or(moments.normalize<kCenter>(load(x + i, count)), count, 0);
    return VectorPair{kCenter ? Simd::add(acc.first, g) : acc.first, Simd::fma(g, y, acc.second)};
  });
  const auto n = static_cast<float>(size);
  const F mean = Simd::broadcast(total / n), minus_slope = Simd::broadcast(-slope / n);
  const F inverse = Simd::broadcast(moments.inverse), scale = Simd::broadcast(moments.scale);
  for_vectors(size, [&](int64_t i, auto count) {
    prefetch(x + size + i, kLanes);  // the next row
    prefetch(dout + size + i, kLanes);
    // Loaded before the stores, after which it would be read again.
    const F y = moments.normalize<kCenter>(load(x + i, count)), upstream = load(dout + i, count);
    F g = gradient(upstream, i, count);
    if constexpr (kCenter) g = Simd::sub(g, mean);
    add_to_parameters(i, count, upstream, y);
    put(dx + i, Simd::mul(Simd::mul(Simd::fma(y, minus_slope, g), inverse), scale), count);
  });
}

template <bool kCenter, class T>
void norm_backward_as(const NormBackward& args, const Executor& executor) {
  const int64_t size = args.size;
  const bool streams = exceeds_caches<T>(3 * args.rows * size, size, args.dx);
  sum_rows({args.dweight, args.dbias}, args.rows, size, static_cast<double>(size) * 0.4 + 10, executor,
           [&](int64_t begin, int64_t end, float* const(&sums)[2]) {
             with_stores<T>(streams, [&](auto put) {
               for (int64_t r = begin; r < end; ++r) {
                 T* dx = args.dx == nullptr ? nullptr : static_cast<T*>(args.dx) + r * size;
                 norm_backward_row<kCenter>(put, dx, static_cast<const T*>(args.x) + r * size,
                                            static_cast<const T*>(args.dout) + r * size, args.weight, sums[0], sums[1],
                                            size, args.eps);
               }
             });
           });
}

void norm_backward(Element element, const NormBackward& args, const Executor& executor) {
  with_type(element, [&](auto* type) {
    using T = Pointee<decltype(type)>;
    args.center ? norm_backward_as<true, T>(args, executor) : norm_backward_as<false, T>(args, executor);
  });
}

// Computes dx of one group. For each channel, `sums` has the sums of dout * y and of dout, which are the gradients of
// the channel's parameters in this example.
template <class T, class Put>
void group_norm_backward_dx(Put put, T* dx, const T* x, const T* dout, const float* weight, const float* sums_y,
                            const float* sums_dout, int64_t channels, int64_t size, const Moments& moments) {
  float total = 0, slope = 0;
  for (int64_t c = 0; c < channels; ++c) {
    const float factor = weight == nullptr ? 1.0f : weight[c];
    total += factor * sums_dout[c];
    slope += factor * sums_y[c];
  }
  const auto n = static_cast<float>(channels * size);
  const F mean = Simd::broadcast(total / n), minus_slope = Simd::broadcast(-slope / n);
  const F inverse = Simd::broadcast(moments.inverse), scale = Simd::broadcast(moments.scale);
  const auto gradient = [&](F v, F upstream, F factor) {
    // Rounded before the subtraction, as in the mean: of a group with one element nothing is left.
    const F g = Simd::sub(Simd::mul(upstream, factor), mean);
    return Simd::mul(Simd::mul(Simd::fma(moments.normalize<true>(v), minus_slope, g), inverse), scale);
  };
  if (size == 1) {
    for_vectors(channels, [&](int64_t i, auto count) {
      const F factor = weight == nullptr ? Simd::broadcast(1) : load(weight + i, count);
      put(dx + i, gradient(load(x + i, count), load(dout + i, count), factor), count);
    });
    return;
  }
  for (int64_t c = 0; c < channels; ++c, x += size, dout += size, dx += size) {
    const F factor = Simd::broadcast(weight == nullptr ? 1.0f : weight[c]);
    for_vectors(size, [&](int64_t i, auto count) {
      put(dx + i, gradient(load(x + i, count), load(dout + i, count), factor), count);
    });
  }
}

// Computes the sums over a channel, or takes its element if channels have one element each.
template <class T>
void group_norm_backward_sums(float* sums_y, float* sums_dout, const T* x, const T* dout, int64_t channels,
                              int64_t size, const Moments& moments) {
  if (size == 1) {
    for_vectors(channels, [&](int64_t i, auto count) {
      const F upstream = load(dout + i, count);
      store(sums_y + i, Simd::mul(upstream, moments.normalize<true>(load(x + i, count))), count);
      store(sums_dout + i, upstream, count);
    });
    return;
  }
  for (int64_t c = 0; c < channels; ++c, x += size, dout += size) {
    const auto [sum, slope] = sums_of(size, [&](VectorPair acc, int64_t i, auto count) {
      const F upstream = load(dout + i, count);
      // Lanes that do not count are zero in dout, but y may be infinite there.
      const F y = first_or(moments.normalize<true>(load(x + i, count)), count, 0);
      return VectorPair{Simd::add(acc.first, upstream), Simd::fma(upstream, y, acc.second)};
    });
    sums_dout[c] = sum;
    sums_y[c] = slope;
  }
}

void group_norm_backward(Element element, const GroupNormBackward& args, const Executor& executor) {
  with_type(element, [&](auto* type) {
    using T = Pointee<decltype(type)>;
    const GroupNorm& of = args.forward;
    const int64_t channels = of.channels / of.groups, length = channels * of.size;
    const double nanoseconds = static_cast<double>(length) * 0.4 + 10;
    const bool streams = exceeds_caches<T>(3 * of.batch * of.channels * of.size, of.size, args.dx);
    // For each example, the sums of dout * y, then the sums of dout.
    const Scratch scratch(larger<int64_t>(1, of.batch * 2 * of.channels));
    parallel_for(executor, of.batch * of.groups, nanoseconds, [&](int64_t begin, int64_t end) {
      with_stores<T>(streams, [&](auto put) {
        for (int64_t g = begin; g < end; ++g) {
          const T* x = static_cast<const T*>(of.x) + g * length;
          const T* dout = static_cast<const T*>(args.dout) + g * length;
          const Moments moments = moments_of<true>(x, length, of.eps);
          const int64_t first = g % of.groups * channels;
          float* sums_y = scratch.data() + g / of.groups * 2 * of.channels + first;
          float* sums_dout = sums_y + of.channels;
          group_norm_backward_sums(sums_y, sums_dout, x, dout, channels, of.size, moments);
          if (args.dx == nullptr) continue;
          group_norm_backward_dx(put, static_cast<T*>(args.dx) + g * length, x, dout,
                                 of.weight == nullptr ? nullptr : of.weight + first, sums_y, sums_dout, channels,
                                 of.size, moments);
        }
      });
    });
    add_parts(args.dweight, scratch.data(), of.batch, 2 * of.channels, of.channels, executor);
    add_parts(args.dbias, scratch.data() + of.channels, of.batch, 2 * of.channels, of.channels, executor);
  });
}

}  // namespace
}  // namespace eqxcallback::cpu
