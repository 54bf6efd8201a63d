// The handlers of normalisation. Weights and biases are f32, and may be missing.
#include "ffi/cpu_norm.h"

namespace eqxcallback {
namespace {

// -- rms_norm, layer_norm: x [*batch, size], weight [size], bias [size]

ffi::Error norm(const char* op, bool center, Parameters parameters, ffi::ThreadPool pool, ffi::RemainingArgs args,
                ffi::RemainingRets rets, double eps) {
  return guarded([&] {
    REQUIRE(args.size() >= 1 && args.size() <= 1 + parameters.most && rets.size() == 1, op,
            "1 to " + std::to_string(1 + parameters.most) + " operands and one result");
    const ffi::AnyBuffer x = *args.get<ffi::AnyBuffer>(0), out = **rets.get<ffi::AnyBuffer>(0);
    const Shape shape(op, "x", x, 1);
    REQUIRE(same_shape(x, out) && x.element_type() == out.element_type(), op, "a result of the type of x");
    const Affine affine(op, parameters, args, 1, args.size() - 1, shape[0]);
    const cpu::Norm call{out.untyped_data(), x.untyped_data(), affine.weight,           affine.bias,
                         shape.batch(),      shape[0],         static_cast<float>(eps), center};
    cpu::kernels().norm(element_of(op, x), call, executor_on(pool));
  });
}

ffi::Error rms_norm(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, double eps) {
  return norm("rms_norm", false, kWeight, pool, args, rets, eps);
}
ffi::Error layer_norm(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, double eps) {
  return norm("layer_norm", true, kWeightAndBias, pool, args, rets, eps);
}
ffi::Error layer_norm_bias(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, double eps) {
  return norm("layer_norm_bias", true, kBias, pool, args, rets, eps);
}

// -- group_norm: x [*batch, channels, size], weight [channels], bias [channels]

ffi::Error group_norm_with(const char* op, Parameters parameters, ffi::ThreadPool pool, ffi::RemainingArgs args,
                           ffi::RemainingRets rets, double eps, int64_t groups) {
  return guarded([&] {
    REQUIRE(args.size() >= 1 && args.size() <= 1 + parameters.most && rets.size() == 1, op,
            "1 to " + std::to_string(1 + parameters.most) + " operands and one result");
    const ffi::AnyBuffer x = *args.get<ffi::AnyBuffer>(0), out = **rets.get<ffi::AnyBuffer>(0);
    const Shape shape(op, "x", x, 2);
    REQUIRE(same_shape(x, out) && x.element_type() == out.element_type(), op, "a result of the type of x");
    REQUIRE(groups > 0 && shape[0] % groups == 0, op,
            "groups that divide " + std::to_string(shape[0]) + " channels; got " + std::to_string(groups));
    const Affine affine(op, parameters, args, 1, args.size() - 1, shape[0]);
    const cpu::GroupNorm call{out.untyped_data(), x.untyped_data(), affine.weight,
                              affine.bias,        shape.batch(),    shape[0],
                              shape[1],           groups,           static_cast<float>(eps)};
    cpu::kernels().group_norm(element_of(op, x), call, executor_on(pool));
  });
}

ffi::Error group_norm(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, double eps,
                      int64_t groups) {
  return group_norm_with("group_norm", kWeightAndBias, pool, args, rets, eps, groups);
}
ffi::Error group_norm_bias(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, double eps,
                           int64_t groups) {
  return group_norm_with("group_norm_bias", kBias, pool, args, rets, eps, groups);
}

// -- add_rms_norm: x and residual [*batch, size], weight [size] -> the norm, the sum

ffi::Error add_rms_norm(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, double eps) {
  return guarded([&] {
    constexpr const char* op = "add_rms_norm";
    REQUIRE((args.size() == 2 || args.size() == 3) && rets.size() == 2, op, "two or three operands and two results");
    const ffi::AnyBuffer x = *args.get<ffi::AnyBuffer>(0), residual = *args.get<ffi::AnyBuffer>(1);
    const ffi::AnyBuffer out = **rets.get<ffi::AnyBuffer>(0), sum = **rets.get<ffi::AnyBuffer>(1);
    const Shape shape(op, "x", x, 1);
    for (const ffi::AnyBuffer& other : {residual, out, sum}) {
      REQUIRE(same_shape(x, other) && x.element_type() == other.element_type(), op,
              "residual and results of the type of x");
    }
    const Affine affine(op, kWeight, args, 2, args.size() - 2, shape[0]);
    const cpu::AddRmsNorm call{out.untyped_data(), sum.untyped_data(), x.untyped_data(), residual.untyped_data(),
                               affine.weight,      shape.batch(),      shape[0],         static_cast<float>(eps)};
    cpu::kernels().add_rms_norm(element_of(op, x), call, executor_on(pool));
  });
}

XLA_FFI_DEFINE_HANDLER(kRmsNorm, rms_norm, variadic().Attr<double>("eps"));
XLA_FFI_DEFINE_HANDLER(kLayerNorm, layer_norm, variadic().Attr<double>("eps"));
XLA_FFI_DEFINE_HANDLER(kLayerNormBias, layer_norm_bias, variadic().Attr<double>("eps"));
XLA_FFI_DEFINE_HANDLER(kGroupNorm, group_norm, variadic().Attr<double>("eps").Attr<int64_t>("groups"));
XLA_FFI_DEFINE_HANDLER(kGroupNormBias, group_norm_bias, variadic().Attr<double>("eps").Attr<int64_t>("groups"));
XLA_FFI_DEFINE_HANDLER(kAddRmsNorm, add_rms_norm, variadic().Attr<double>("eps"));

}  // namespace

CpuOps norm_ops() {
  return {{"rms_norm", kRmsNorm},     {"layer_norm", kLayerNorm},          {"layer_norm_bias", kLayerNormBias},
          {"group_norm", kGroupNorm}, {"group_norm_bias", kGroupNormBias}, {"add_rms_norm", kAddRmsNorm}};
}

}  // namespace eqxcallback
