// The handlers of rotary position embedding.
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
    REQUIRE(same_type(x, *out), op, "a result of the type of x");
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

// -- x, cos, sin, the result, its cotangent -> the gradients of x, cos and sin
ffi::Error rotary_embedding_backward(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer cos, ffi::AnyBuffer sin,
                                     ffi::AnyBuffer, ffi::AnyBuffer dout, ffi::RemainingRets rets, int64_t needs_grad) {
  return guarded([&] {
    constexpr const char* op = "rotary_embedding_backward";
    const Gradients gradients(op, rets, needs_grad, 3);
    const Shape shape(op, "x", x, 3), table(op, "cos", cos, 2);
    REQUIRE(same_type(x, dout), op, "a cotangent of the type of x");
    require_table(op, shape, table, cos, sin);
    const Optional dx = gradients(0, x), dcos = gradients(1, cos), dsin = gradients(2, sin);
    const cpu::RotaryEmbeddingBackward call{data_of(dx),
                                            static_cast<float*>(data_of(dcos)),
                                            static_cast<float*>(data_of(dsin)),
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

EQXCALLBACK_CPU_KERNEL(rotary_embedding, rotary_embedding,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // cos
                           .Arg<ffi::AnyBuffer>()  // sin
                           .Ret<ffi::AnyBuffer>());
EQXCALLBACK_CPU_KERNEL(rotary_embedding_backward, rotary_embedding_backward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // cos
                           .Arg<ffi::AnyBuffer>()  // sin
                           .Arg<ffi::AnyBuffer>()  // the result
                           .Arg<ffi::AnyBuffer>()  // its cotangent
                           .RemainingRets()
                           .Attr<int64_t>("needs_grad"));

}  // namespace
}  // namespace eqxcallback
