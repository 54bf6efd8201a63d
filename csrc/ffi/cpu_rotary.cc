// The handlers of rotary position embedding.
#include <algorithm>
#include <cstring>

#include "ffi/cpu_call.h"

namespace eqxcallback {
namespace {

// cos and sin f32 [*batch, rows, size / 2] for x [*batch, rows, heads, size]
void require_table(const char* op, const Shape& shape, const Shape& table, const ffi::AnyBuffer& cos,
                   const ffi::AnyBuffer& sin) {
  require_type(op, "cos", cos, ffi::DataType::F32, "float32");
  require_type(op, "sin", sin, ffi::DataType::F32, "float32");
  REQUIRE(same_shape(cos, sin) && table.shared_by(shape) && table[0] == shape[0] && 2 * table[1] == shape[2], op,
          "cos and sin of shape (*batch, rows, head_size / 2), matching x of shape " + text(shape.dims) + "; got " +
              text(cos.dimensions()) + " and " + text(sin.dimensions()));
}

ffi::Error rotary_embedding(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer cos, ffi::AnyBuffer sin, Out out) {
  return guarded([&] {
    constexpr const char* op = "rotary_embedding";
    const Shape shape(op, "x", x, 3), table(op, "cos", cos, 2);
    REQUIRE(same_shape(x, *out) && x.element_type() == out->element_type(), op, "a result of the type of x");
    require_table(op, shape, table, cos, sin);
    const cpu::RotaryEmbedding call{out->untyped_data(),
                                    x.untyped_data(),
                                    cos.typed_data<float>(),
                                    sin.typed_data<float>(),
                                    shape.batch() * shape[0],
                                    table.batch() * table[0],
                                    shape[1],
                                    shape[2]};
    cpu::kernels().rotary_embedding(element_of(op, x), call, executor_on(pool));
  });
}

// -- x, cos, sin, the result, its cotangent -> the gradients of x, cos and sin, which are zeros if
// those of the table are not `asked`
ffi::Error rotary_embedding_backward(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer cos, ffi::AnyBuffer sin,
                                     ffi::AnyBuffer, ffi::AnyBuffer dout, Out dx, Out dcos, Out dsin,
                                     ffi::Span<const int64_t> asked) {
  return guarded([&] {
    constexpr const char* op = "rotary_embedding_backward";
    const Shape shape(op, "x", x, 3), table(op, "cos", cos, 2);
    for (const ffi::AnyBuffer& other : {dout, *dx}) {
      REQUIRE(same_shape(x, other) && x.element_type() == other.element_type(), op,
              "a cotangent and a gradient of the type of x");
    }
    require_table(op, shape, table, cos, sin);
    for (const ffi::AnyBuffer& other : {*dcos, *dsin}) {
      REQUIRE(same_shape(cos, other) && other.element_type() == ffi::DataType::F32, op,
              "gradients of the type of cos and sin; got " + text(other.dimensions()));
    }
    const bool has_table = std::any_of(asked.begin(), asked.end(), [](int64_t operand) { return operand > 0; });
    if (!has_table) {
      for (Out* of_table : {&dcos, &dsin}) std::memset((*of_table)->untyped_data(), 0, (*of_table)->size_bytes());
    }
    const cpu::RotaryEmbeddingBackward call{dx->untyped_data(),
                                            has_table ? dcos->typed_data<float>() : nullptr,
                                            has_table ? dsin->typed_data<float>() : nullptr,
                                            x.untyped_data(),
                                            cos.typed_data<float>(),
                                            sin.typed_data<float>(),
                                            dout.untyped_data(),
                                            shape.batch() * shape[0],
                                            table.batch() * table[0],
                                            shape[1],
                                            shape[2]};
    cpu::kernels().rotary_embedding_backward(element_of(op, x), call, executor_on(pool));
  });
}

XLA_FFI_DEFINE_HANDLER(kRotaryEmbedding, rotary_embedding,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // cos
                           .Arg<ffi::AnyBuffer>()  // sin
                           .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kRotaryEmbeddingBackward, rotary_embedding_backward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // cos
                           .Arg<ffi::AnyBuffer>()  // sin
                           .Arg<ffi::AnyBuffer>()  // the result
                           .Arg<ffi::AnyBuffer>()  // its cotangent
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<ffi::Span<const int64_t>>("asked"));

}  // namespace

CpuOps rotary_ops() {
  return {{"rotary_embedding", kRotaryEmbedding}, {"rotary_embedding_backward", kRotaryEmbeddingBackward}};
}

}  // namespace eqxcallback
