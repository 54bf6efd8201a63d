// The handler of products of matrices.
#include "ffi/matrix_product.h"

#include <memory>

#include "ffi/cpu_call.h"

namespace eqxcallback {
namespace {

cpu::MatrixProduct product_of(cpu::Element element, int64_t rows, int64_t columns, int64_t size, bool a_has_columns,
                              bool b_has_columns) {
  return {nullptr, nullptr, nullptr, element, 1, rows, columns, size, a_has_columns, b_has_columns, nullptr};
}

// -- a bf16 or f32 [examples, rows, size] or [examples, size, rows], b of the same type with columns in place of rows,
// bias f32 [columns], which may be absent -> [examples, rows, columns], f32 if the factors are, and memory for the
// packed factors

ffi::Error matrix_product(ffi::ThreadPool pool, ffi::RemainingArgs args, Out out, Out packed, int64_t present,
                          int64_t a_has_columns, int64_t b_has_columns) {
  return guarded([&] {
    constexpr const char* op = "matrix_product";
    const Operands operands(op, args, present, {"a", "b", "bias"}, 2);
    const ffi::AnyBuffer a = operands[0], b = operands[1];
    const Dims of_a = a.dimensions(), of_b = b.dimensions(), result = out->dimensions();
    const cpu::Element element = element_of(op, a);
    REQUIRE(element != cpu::Element::kF16 && b.element_type() == a.element_type(), op,
            "factors of bfloat16 or of float32");
    REQUIRE(element == cpu::Element::kBf16 || out->element_type() == ffi::DataType::F32, op,
            "a result of float32 for factors of float32");
    REQUIRE(of_a.size() == 3 && of_b.size() == 3 && result.size() == 3, op, "factors and a result of 3 axes");
    const bool a_columns = a_has_columns != 0, b_columns = b_has_columns != 0;
    const int64_t size = of_a[a_columns ? 1 : 2];
    REQUIRE(of_b[b_columns ? 1 : 2] == size && of_a[0] == of_b[0], op,
            "factors of as many examples and numbers; got " + text(of_a) + " and " + text(of_b));
    REQUIRE(result[0] == of_a[0] && result[1] == of_a[a_columns ? 2 : 1] && result[2] == of_b[b_columns ? 2 : 1], op,
            "a result of shape (examples, rows, columns); got " + text(result));
    cpu::MatrixProduct call = product_of(element, result[1], result[2], size, a_columns, b_columns);
    call.out = out->untyped_data(), call.examples = result[0];
    call.a = a.untyped_data(), call.b = b.untyped_data(), call.packed = packed->untyped_data();
    call.bias = vector_of(op, "bias", operands(2), result[2]);
    // A program that was compiled where another instruction set was chosen may have planned less.
    std::unique_ptr<char[]> own;
    if (const auto needed = static_cast<size_t>(cpu::kernels().product_bytes(call)); packed->size_bytes() < needed) {
      own.reset(new char[needed]), call.packed = own.get();
    }
    cpu::kernels().matrix_product(element_of(op, *out), call, executor_on(pool));
  });
}

EQXCALLBACK_CPU_KERNEL(matrix_product, matrix_product,
                       optional_operands()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<int64_t>("present")
                           .Attr<int64_t>("a_has_columns")
                           .Attr<int64_t>("b_has_columns"));

}  // namespace

int64_t matrix_product_bytes(bool is_f32, int64_t rows, int64_t columns, int64_t size, bool a_has_columns,
                             bool b_has_columns) {
  const cpu::Element element = is_f32 ? cpu::Element::kF32 : cpu::Element::kBf16;
  return cpu::kernels().product_bytes(product_of(element, rows, columns, size, a_has_columns, b_has_columns));
}

}  // namespace eqxcallback
