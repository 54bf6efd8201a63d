// Linear layers over int8 weights with a scale for each output: they are multiplied as f32, and summed as that.
#pragma once

#include "cpu/kernels/quantized_linear.h"

namespace eqxcallback::cpu {
namespace {

// The dot products of kRows rows of weights with x.
template <int kRows>
void int8_dots(float* out, const int8_t* weight, const float* x, int64_t size) {
  F total[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) total[r] = Simd::zero();
  for_vectors(size, [&](int64_t i, auto count) {
    if (i % 64 == 0) {
      // Rows are short, and several are read at once: too many streams for the processor to see what comes next.
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) __builtin_prefetch(weight + (kRows + r) * size + i);
    }
    const F v = load(x + i, count);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) total[r] = Simd::fma(load(weight + r * size + i, count), v, total[r]);
  });
  for (int r = 0; r < kRows; ++r) out[r] = Simd::sum(total[r]);
}

template <class T>
void int8_vector(const Int8Linear& args, const float* x, const Executor& executor) {
  constexpr int kRows = 8;
  parallel_for(
      executor, args.out_features, static_cast<double>(args.in_features) * 0.1 + 5,
      [&](int64_t begin, int64_t end) {
        float dots[kRows];
        T* out = static_cast<T*>(args.out);
        int64_t o = begin;
        for (; o + kRows <= end; o += kRows) {
          int8_dots<kRows>(dots, args.weight + o * args.in_features, x, args.in_features);
          for (int r = 0; r < kRows; ++r) from_float(dots[r] * args.scale[o + r], out[o + r]);
        }
        for (; o < end; ++o) {
          int8_dots<1>(dots, args.weight + o * args.in_features, x, args.in_features);
          from_float(dots[0] * args.scale[o], out[o]);
        }
      },
      kRows);
}

void int8_linear(Element element, const Int8Linear& args, const Executor& executor) {
  with_type(element, [&](auto* type) {
    using T = Pointee<decltype(type)>;
    const int64_t size = args.in_features, padded = (size + kLanes - 1) / kLanes * kLanes;
    const auto run = [&](const float* x) {
      if (args.rows == 1) return int8_vector<T>(args, x, executor);
      multiply_decoded(static_cast<T*>(args.out), x, args.rows, args.out_features, padded,
                       static_cast<double>(size) * 0.1, executor, [&](float* row, int64_t o) {
                         const F scale = Simd::broadcast(args.scale[o]);
                         for_vectors(size, [&](int64_t i, auto count) {
                           Simd::store(row + i, Simd::mul(load(args.weight + o * size + i, count), scale));
                         });
                       });
    };
    if constexpr (std::is_same_v<T, float>) {
      if (args.rows == 1 || size == padded) return run(static_cast<const float*>(args.x));
    }
    Scratch x(larger<int64_t>(1, args.rows * padded));
    for (int64_t r = 0; r < args.rows; ++r) {
      const T* from = static_cast<const T*>(args.x) + r * size;
      for_vectors(size, [&](int64_t i, auto count) { Simd::store(x.data() + r * padded + i, load(from + i, count)); });
    }
    run(x.data());
  });
}

}  // namespace
}  // namespace eqxcallback::cpu
