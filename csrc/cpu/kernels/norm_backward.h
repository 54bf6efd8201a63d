// The gradients of RMS norm and layer norm. With g = dout * weight and y the normalised row,
// dx = inverse * (g - mean(g) - y * mean(g * y)), where RMS norm has no mean of g; dweight = sum(dout * y) and
// dbias = sum(dout) over the rows.
#pragma once

#include "cpu/kernels/norm.h"

namespace eqxcallback::cpu {
namespace {

// `dweight` and `dbias` are added to, where they are not null.
template <bool kCenter, class T, class Put>
void norm_backward_row(Put put, T* dx, const T* x, const T* dout, const float* weight, float* dweight, float* dbias,
                       int64_t size, float eps) {
  const Moments moments = moments_of<kCenter>(x, size, eps);
  const auto gradient = [&](F upstream, int64_t i, auto count) {
    return weight == nullptr ? upstream : Simd::mul(upstream, load(weight + i, count));
  };
  struct Sums {
    F g, slope;
  };
  const Sums sums = fold(
      size, Sums{Simd::zero(), Simd::zero()},
      [&](Sums acc, int64_t i, auto count) {
        const F g = gradient(load(dout + i, count), i, count);
        // Lanes that do not count are zero in g, but y may be infinite there.
        const F y = first_or(moments.normalize<kCenter>(load(x + i, count)), count, 0);
        return Sums{kCenter ? Simd::add(acc.g, g) : acc.g, Simd::fma(g, y, acc.slope)};
      },
      [](Sums a, Sums b) { return Sums{Simd::add(a.g, b.g), Simd::add(a.slope, b.slope)}; });
  const auto n = static_cast<float>(size);
  const F mean = Simd::broadcast(Simd::sum(sums.g) / n), minus_slope = Simd::broadcast(-Simd::sum(sums.slope) / n);
  const F inverse = Simd::broadcast(moments.inverse), scale = Simd::broadcast(moments.scale);
  for_vectors(size, [&](int64_t i, auto count) {
    prefetch(x + size + i, kLanes);  // the next row
    prefetch(dout + size + i, kLanes);
    // Before the stores, after which it would be read again.
    const F y = moments.normalize<kCenter>(load(x + i, count)), upstream = load(dout + i, count);
    F g = gradient(upstream, i, count);
    if constexpr (kCenter) g = Simd::sub(g, mean);
    if (dweight != nullptr) store(dweight + i, Simd::fma(upstream, y, load(dweight + i, count)), count);
    if (dbias != nullptr) store(dbias + i, Simd::add(upstream, load(dbias + i, count)), count);
    put(dx + i, Simd::mul(Simd::mul(Simd::fma(y, minus_slope, g), inverse), scale), count);
  });
}

template <bool kCenter, class T>
void norm_backward_as(const NormBackward& args, const Executor& executor) {
  // The sums over rows are those of parts of them, then those over the parts: the same for any number of threads.
  constexpr int64_t kParts = 64, kRows = 8;
  const int64_t size = args.size, rows = larger(kRows, (args.rows + kParts - 1) / kParts);
  const int64_t parts = (args.rows + rows - 1) / rows;
  const int64_t sums = (args.dweight != nullptr ? 1 : 0) + (args.dbias != nullptr ? 1 : 0);
  Scratch scratch(larger<int64_t>(1, parts * sums * size));
  const double nanoseconds = static_cast<double>(size) * 0.4 + 10;
  const bool streams = exceeds_caches<T>(3 * args.rows * size, size, args.dx);
  parallel_for(executor, parts, nanoseconds * static_cast<double>(rows), [&](int64_t begin, int64_t end) {
    with_stores<T>(streams, [&](auto put) {
      for (int64_t part = begin; part < end; ++part) {
        float* of_part = scratch.data() + part * sums * size;
        std::memset(of_part, 0, static_cast<size_t>(sums * size) * sizeof(float));
        float* dweight = args.dweight == nullptr ? nullptr : of_part;
        float* dbias = args.dbias == nullptr ? nullptr : of_part + (sums - 1) * size;
        for (int64_t r = part * rows; r < smaller(args.rows, (part + 1) * rows); ++r) {
          norm_backward_row<kCenter>(put, static_cast<T*>(args.dx) + r * size, static_cast<const T*>(args.x) + r * size,
                                     static_cast<const T*>(args.dout) + r * size, args.weight, dweight, dbias, size,
                                     args.eps);
        }
      }
    });
  });
  float* results[2] = {args.dweight != nullptr ? args.dweight : args.dbias, args.dbias};
  parallel_for(
      executor, sums == 0 ? 0 : size, static_cast<double>(parts * sums) * 0.1,
      [&](int64_t begin, int64_t end) {
        for (int64_t s = 0; s < sums; ++s) {
          for_vectors(end - begin, [&](int64_t i, auto count) {
            F total = Simd::zero();
            for (int64_t part = 0; part < parts; ++part) {
              total = Simd::add(total, load(scratch.data() + (part * sums + s) * size + begin + i, count));
            }
            store(results[s] + begin + i, total, count);
          });
        }
      },
      kLanes);
}

void norm_backward(Element element, const NormBackward& args, const Executor& executor) {
  with_type(element, [&](auto* type) {
    using T = Pointee<decltype(type)>;
    args.center ? norm_backward_as<true, T>(args, executor) : norm_backward_as<false, T>(args, executor);
  });
}

}  // namespace
}  // namespace eqxcallback::cpu
