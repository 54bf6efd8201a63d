// Linear layers over int8 weights with a scale for each output, which multiplies their sums in f32. Few rows of x read
// each weight once; for more of them, a few rows of weights at a time are widened into cache.
#pragma once

#include "cpu/kernels/dots.h"
#include "cpu/kernels/quantized_linear.h"

namespace eqxcallback::cpu {
namespace {

template <class T>
void int8_linear_as(const Int8Linear& args, const Executor& executor) {
  const int64_t size = args.in_features, padded = (size + kLanes - 1) / kLanes * kLanes;
  T* out = static_cast<T*>(args.out);
  Scratch widened(larger<int64_t>(1, args.rows * padded));
  const auto widen = [&](int64_t stride) {
    for (int64_t r = 0; r < args.rows; ++r) {
      const T* x = static_cast<const T*>(args.x) + r * size;
      float* row = widened.data() + r * stride;
      for_vectors(size, [&](int64_t i, auto count) { Simd::store(row + i, load(x + i, count)); });
    }
    return widened.data();
  };
  const float* x;
  if constexpr (std::is_same_v<T, float>) {
    x = static_cast<const float*>(args.x);
  } else {
    x = widen(size);
  }
  constexpr int64_t kFewRows = 16;
  if (args.rows <= kFewRows) {
    const double nanoseconds = static_cast<double>(size) * (0.05 + 0.02 * static_cast<double>(args.rows)) + 5;
    const auto put = [&](int64_t r, int64_t o, float sum) {
      from_float(sum * args.scale[o], out[r * args.out_features + o]);
    };
    return parallel_for(
        executor, args.out_features, nanoseconds,
        [&](int64_t begin, int64_t end) { few_rows(x, args.rows, args.weight, begin, end, size, put); }, 8);
  }
  if (padded != size) x = widen(padded);
  multiply_decoded(out, x, args.rows, args.out_features, padded, static_cast<double>(size) * 0.1, executor,
                   [&](float* row, int64_t o) {
                     const F scale = Simd::broadcast(args.scale[o]);
                     for_vectors(size, [&](int64_t i, auto count) {
                       Simd::store(row + i, Simd::mul(load(args.weight + o * size + i, count), scale));
                     });
                   });
}

void int8_linear(Element element, const Int8Linear& args, const Executor& executor) {
  with_type(element, [&](auto* type) { int8_linear_as<Pointee<decltype(type)>>(args, executor); });
}

}  // namespace
}  // namespace eqxcallback::cpu
