// Linear layers over few rows: weights are read once, widened in registers, multiplied and summed in f32. Those over
// many are products of matrices.
#pragma once

#include "cpu/kernels/few_rows.h"
#include "cpu/kernels/matrix_product.h"

namespace eqxcallback::cpu {
namespace {

template <class T>
void linear_as(const Linear& args, const Executor& executor) {
  const int64_t size = args.in_features;
  Scratch widened(args.rows * size);
  const auto* x = as_factors<T>(static_cast<const T*>(args.x), args.rows * size, widened.data());
  const FewRows<Factor<T>, T> few_rows(x, size, args.rows, size, args.prefetching);
  const double nanoseconds = static_cast<double>(size) * (0.1 + 0.02 * static_cast<double>(args.rows)) + 5;
  parallel_for(
      executor, args.out_features, nanoseconds,
      [&](int64_t begin, int64_t end) {
        few_rows.multiply(static_cast<const T*>(args.weight), begin, end, [&](int64_t r, int64_t o, float sum) {
          const float bias = args.bias == nullptr ? 0.0f : args.bias[o];
          from_float(sum + bias, static_cast<T*>(args.out)[r * args.out_features + o]);
        });
      },
      8);
}

void linear(Element element, const Linear& args, const Executor& executor) {
  with_type(element, [&](auto* type) { linear_as<Pointee<decltype(type)>>(args, executor); });
}

// By vectors, a product of matrices is faster with more rows than these: packing its factors pays.
inline constexpr int64_t kFewRowsByVectors = 32;

// Returns true if these rows are many for a product of matrices of this type.
template <class T>
bool are_many([[maybe_unused]] int64_t rows) {
#ifdef EQXCALLBACK_TILES
  return kHasTiles<T>;
#else
  return rows > kFewRowsByVectors;
#endif
}

// The same for several rows: as a product of matrices where that is faster.
void linear_rows(Element element, const Linear& args, const Executor& executor) {
  with_type(element, [&](auto* type) {
    using T = Pointee<decltype(type)>;
    if constexpr (!std::is_same_v<T, F16>) {
      if (are_many<T>(args.rows)) {
        MatrixProduct call{args.out,          args.x,           args.weight, element, 1,       args.rows,
                           args.out_features, args.in_features, false,       false,   nullptr, args.bias};
        Scratch packed(ProductPlan(call).bytes() / 4);
        call.packed = packed.data();
        return matrix_product_as<T>(call, executor);
      }
    }
    linear_as<T>(args, executor);
  });
}

}  // namespace
}  // namespace eqxcallback::cpu
