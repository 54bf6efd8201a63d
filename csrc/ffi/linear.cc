// The handler of linear layers.
#include "cpu/processor.h"
#include "ffi/cpu_call.h"

namespace eqxcallback {
namespace {

// -- linear: x [*batch, in_features], weight [out_features, in_features], bias f32 [out_features], which may be absent

ffi::Error linear(ffi::ThreadPool pool, ffi::RemainingArgs args, Out out, int64_t present) {
  return guarded([&] {
    constexpr const char* op = "linear";
    const Operands operands(op, args, present, {"x", "weight", "bias"}, 2);
    const ffi::AnyBuffer x = operands[0], weight = operands[1];
    const Shape in(op, "x", x, 1), result(op, "the result", *out, 1);
    const Dims weights = weight.dimensions();
    REQUIRE(weights.size() == 2 && weights[1] == in[0] && weight.element_type() == x.element_type(), op,
            "weight of the type of x and shape (out_features, " + std::to_string(in[0]) + "); got " + text(weights));
    REQUIRE(result[0] == weights[0] && in.same_batch(result) && x.element_type() == out->element_type(), op,
            "a result of shape (*batch, out_features); got " + text(out->dimensions()));
    const float* bias = vector_of(op, "bias", operands(2), weights[0]);
    const cpu::Linear call{
        out->untyped_data(), x.untyped_data(), weight.untyped_data(), bias, in.batch(), weights[0], in[0],
        cpu::prefetching()};
    const cpu::Kernels& kernels = cpu::kernels();
    const auto run = call.rows < cpu::kSeveralRows ? kernels.linear : kernels.linear_rows;
    run(element_of(op, x), call, executor_on(pool));
  });
}

EQXCALLBACK_CPU_KERNEL(linear, linear, bind_forward());

}  // namespace
}  // namespace eqxcallback
