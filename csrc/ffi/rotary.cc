// The handlers of rotary position embedding.
#include "ffi/cpu_call.h"

namespace eqxcallback {
namespace {

// Checks cos and sin, f32 [*batch, rows, size / 2] for x [*batch, rows, heads, size].
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

// -- qkv [*batch, count, heads + 2 * kv_heads, size], cos, sin, k_cache and v_cache [*batch, length, kv_heads, size] in
// place, position s32 [*batch] -> q [*batch, count, heads, size], the caches
ffi::Error rotary_append(ffi::ThreadPool pool, ffi::AnyBuffer qkv, ffi::AnyBuffer cos, ffi::AnyBuffer sin,
                         ffi::AnyBuffer k_cache, ffi::AnyBuffer v_cache, ffi::AnyBuffer position, Out q, Out k_out,
                         Out v_out) {
  return guarded([&] {
    constexpr const char* op = "rotary_append";
    const Shape from(op, "qkv", qkv, 3), table(op, "cos", cos, 2), cache(op, "k_cache", k_cache, 3), to(op, "q", *q, 3),
        start(op, "position", position, 0);
    REQUIRE(same_type(k_cache, v_cache) && same_type(k_cache, *k_out) && same_type(v_cache, *v_out) &&
                k_cache.element_type() == qkv.element_type() && q->element_type() == qkv.element_type(),
            op, "caches of one type, that of qkv, and results of these types");
    REQUIRE(cache.same_batch(from) && cache[2] == from[2] && from[0] <= cache[0] && to.same_batch(from) &&
                to[0] == from[0] && to[2] == from[2] && to[1] + 2 * cache[1] == from[1],
            op,
            "qkv of shape (*batch, rows, heads + 2 * kv_heads, size) that fits into the caches of shape " +
                text(cache.dims) + "; got " + text(from.dims));
    require_table(op, from, table, cos, sin);
    require_type(op, "position", position, ffi::DataType::S32, "int32");
    REQUIRE(start.shared_by(cache), op, "a position for each cache; got the shape " + text(position.dimensions()));
    if (qkv.element_count() == 0) return;
    // XLA has put the operands where the results are, and copied them first if anything else still needs them.
    REQUIRE(k_cache.untyped_data() == k_out->untyped_data() && v_cache.untyped_data() == v_out->untyped_data(), op,
            "the results in the memory of the caches");
    const cpu::RotaryAppend call{q->untyped_data(),
                                 k_out->untyped_data(),
                                 v_out->untyped_data(),
                                 qkv.untyped_data(),
                                 cos.typed_data<float>(),
                                 sin.typed_data<float>(),
                                 position.typed_data<int32_t>(),
                                 from.batch(),
                                 from[0],
                                 table.batch() * table[0],
                                 to[1],
                                 cache[1],
                                 from[2],
                                 cache[0],
                                 start.batch()};
    cpu::kernels().rotary_append(element_of(op, qkv), call, executor_on(pool));
  });
}

EQXCALLBACK_CPU_KERNEL(rotary_append, rotary_append,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // qkv
                           .Arg<ffi::AnyBuffer>()  // cos
                           .Arg<ffi::AnyBuffer>()  // sin
                           .Arg<ffi::AnyBuffer>()  // k_cache
                           .Arg<ffi::AnyBuffer>()  // v_cache
                           .Arg<ffi::AnyBuffer>()  // position
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>());
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
