// Products of matrices: by tiles, or by vectors.
#pragma once

#ifdef EQXCALLBACK_TILES
#include "cpu/kernels/tile_product.h"
#else
#include "cpu/kernels/vector_product.h"
#endif

namespace eqxcallback::cpu {
namespace {

#ifdef EQXCALLBACK_TILES
using ProductPlan = TileProductPlan;
#else
using ProductPlan = VectorProductPlan;
#endif

template <class T, class N>
void matrix_product_of(const MatrixProduct& args, const Executor& executor) {
  const ProductPlan plan(args);
  const auto lines = [&](const void* factor, int64_t example, int64_t count, bool has_columns) {
    const N* data = static_cast<const N*>(factor) + example * count * args.size;
    return FactorLines<N>{data, count, args.size, has_columns ? count : args.size, has_columns};
  };
  for (int64_t e = 0; e < args.examples && args.rows > 0 && args.columns > 0; ++e) {
    const auto a = lines(args.a, e, args.rows, args.a_has_columns),
               b = lines(args.b, e, args.columns, args.b_has_columns);
    T* out = static_cast<T*>(args.out) + e * args.rows * args.columns;
    PartOfResult<T> to{out, args.columns, args.rows, args.columns, args.bias};
    if constexpr (std::is_same_v<T, float>) to.so_far = out, to.so_far_stride = args.columns;
    multiply_factors(to, plan, args.packed, a, b, executor);
  }
}

template <class T>
void matrix_product_as(const MatrixProduct& args, const Executor& executor) {
  if (args.element == Element::kBf16) return matrix_product_of<T, Bf16>(args, executor);
  if constexpr (std::is_same_v<T, float>) matrix_product_of<T, float>(args, executor);  // others are rounded by XLA
}

int64_t product_bytes(const MatrixProduct& args) { return ProductPlan(args).bytes(); }

void matrix_product(Element of_out, const MatrixProduct& args, const Executor& executor) {
  with_type(of_out, [&](auto* type) { matrix_product_as<Pointee<decltype(type)>>(args, executor); });
}

}  // namespace
}  // namespace eqxcallback::cpu
