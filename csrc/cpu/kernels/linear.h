// Linear layers of few rows: weights are read once, widened in registers, multiplied and summed in f32.
#pragma once

#include "cpu/kernels/common.h"

namespace eqxcallback::cpu {
namespace {

// out[r, w] = the dot product of row r of x and row w of the weights. `ahead`: the rows of weights that come next are
// not in cache. They are short, and several are read at once: too many streams for the processor to see what comes
// next.
template <int kRows, int kWeights, class T>
void linear_tile(float* out, const float* x, const T* weight, int64_t size, bool ahead) {
  constexpr int64_t kLine = 64 / sizeof(T);
  F acc[kRows][kWeights];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int w = 0; w < kWeights; ++w) acc[r][w] = Simd::zero();
  }
  for_vectors(size, [&](int64_t i, auto count) {
    if (ahead && i % kLine == 0) {
#pragma GCC unroll 8
      for (int w = 0; w < kWeights; ++w) __builtin_prefetch(weight + (kWeights + w) * size + i);
    }
    F values[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) values[r] = load(x + r * size + i, count);
#pragma GCC unroll 8
    for (int w = 0; w < kWeights; ++w) {
      const F v = load(weight + w * size + i, count);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) acc[r][w] = Simd::fma(values[r], v, acc[r][w]);
    }
  });
  for (int r = 0; r < kRows; ++r) {
    for (int w = 0; w < kWeights; ++w) out[r * kWeights + w] = Simd::sum(acc[r][w]);
  }
}

// kRows rows of x and kWeights of the weights, from row r and o on.
template <int kRows, int kWeights, class T>
void linear_results(const Linear& args, const float* x, int64_t r, int64_t o, bool ahead) {
  float dots[kRows * kWeights];
  const int64_t size = args.in_features;
  linear_tile<kRows, kWeights>(dots, x + r * size, static_cast<const T*>(args.weight) + o * size, size, ahead);
  for (int i = 0; i < kRows; ++i) {
    T* out = static_cast<T*>(args.out) + (r + i) * args.out_features + o;
    for (int w = 0; w < kWeights; ++w) {
      from_float(dots[i * kWeights + w] + (args.bias == nullptr ? 0.0f : args.bias[o + w]), out[w]);
    }
  }
}

// All rows of x.
template <int kWeights, class T>
void linear_columns(const Linear& args, const float* x, int64_t o) {
  constexpr int kRows = kLanes < 16 ? 2 : 4;
  int64_t r = 0;
  for (; r + kRows <= args.rows; r += kRows) linear_results<kRows, kWeights, T>(args, x, r, o, r == 0);
  for (; r < args.rows; ++r) linear_results<1, kWeights, T>(args, x, r, o, r == 0);
}

template <class T>
void linear_as(const Linear& args, const Executor& executor) {
  constexpr int kWeights = 4;
  const int64_t size = args.in_features;
  Scratch widened(larger<int64_t>(1, args.rows * size));
  for_vectors(args.rows * size, [&](int64_t i, auto count) {
    Simd::store(widened.data() + i, load(static_cast<const T*>(args.x) + i, count));
  });
  const double nanoseconds = static_cast<double>(size) * (0.1 + 0.02 * static_cast<double>(args.rows)) + 5;
  parallel_for(
      executor, args.out_features, nanoseconds,
      [&](int64_t begin, int64_t end) {
        int64_t o = begin;
        if (args.rows == 1) {  // one row alone has too few sums that do not wait for each other
          for (; o + 2 * kWeights <= end; o += 2 * kWeights) {
            linear_results<1, 2 * kWeights, T>(args, widened.data(), 0, o, true);
          }
        }
        for (; o + kWeights <= end; o += kWeights) linear_columns<kWeights, T>(args, widened.data(), o);
        for (; o < end; ++o) linear_columns<1, T>(args, widened.data(), o);
      },
      2 * kWeights);
}

void linear(Element element, const Linear& args, const Executor& executor) {
  with_type(element, [&](auto* type) { linear_as<Pointee<decltype(type)>>(args, executor); });
}

}  // namespace
}  // namespace eqxcallback::cpu
