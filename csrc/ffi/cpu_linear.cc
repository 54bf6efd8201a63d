// The handler of linear layers.
#include "ffi/cpu_call.h"

namespace eqxcallback {
namespace {

// -- linear: x [*batch, in_features], weight [out_features, in_features], bias f32 [out_features], which may be missing

ffi::Error linear(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return guarded([&] {
    constexpr const char* op = "linear";
    REQUIRE((args.size() == 2 || args.size() == 3) && rets.size() == 1, op, "2 or 3 operands and one result");
    const ffi::AnyBuffer x = *args.get<ffi::AnyBuffer>(0), weight = *args.get<ffi::AnyBuffer>(1);
    const ffi::AnyBuffer out = **rets.get<ffi::AnyBuffer>(0);
    const Shape in(op, "x", x, 1), result(op, "the result", out, 1);
    const Dims weights = weight.dimensions();
    REQUIRE(weights.size() == 2 && weights[1] == in[0] && weight.element_type() == x.element_type(), op,
            "weight of the type of x and shape (out_features, " + std::to_string(in[0]) + "); got " + text(weights));
    REQUIRE(result[0] == weights[0] && in.same_batch(result) && x.element_type() == out.element_type(), op,
            "a result of shape (*batch, out_features); got " + text(out.dimensions()));
    const float* bias = nullptr;
    if (args.size() == 3) {
      const ffi::AnyBuffer given = *args.get<ffi::AnyBuffer>(2);
      require_type(op, "bias", given, ffi::DataType::F32, "float32");
      const Shape shape(op, "bias", given, 1);
      REQUIRE(shape.batch_rank() == 0 && shape[0] == weights[0], op,
              "bias of shape (" + std::to_string(weights[0]) + ",); got " + text(given.dimensions()));
      bias = given.typed_data<float>();
    }
    const cpu::Linear call{
        out.untyped_data(), x.untyped_data(), weight.untyped_data(), bias, in.batch(), weights[0], in[0]};
    cpu::kernels().linear(element_of(op, x), call, executor_on(pool));
  });
}

XLA_FFI_DEFINE_HANDLER(kLinear, linear, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets());

}  // namespace

CpuOps linear_ops() { return {{"linear", kLinear}}; }

}  // namespace eqxcallback
