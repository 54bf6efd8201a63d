// The handlers of the gradients of norms: x [*batch, size], the parameters that there are, the result, its cotangent ->
// the gradients of x and of the parameters, summed over the batch.
#include "ffi/cpu_norm.h"

namespace eqxcallback {
namespace {

ffi::Error norm_backward(const char* op, bool center, Parameters parameters, ffi::ThreadPool pool,
                         ffi::RemainingArgs args, ffi::RemainingRets rets, double eps) {
  return guarded([&] {
    REQUIRE(rets.size() >= 1 && rets.size() <= 1 + parameters.most && args.size() == rets.size() + 2, op,
            "x, its parameters, the result and its cotangent, and a result for each of the first");
    const size_t count = rets.size() - 1;
    const ffi::AnyBuffer x = *args.get<ffi::AnyBuffer>(0), dout = *args.get<ffi::AnyBuffer>(count + 2);
    const ffi::AnyBuffer dx = **rets.get<ffi::AnyBuffer>(0);
    const Shape shape(op, "x", x, 1);
    for (const ffi::AnyBuffer& other : {dout, dx}) {
      REQUIRE(same_shape(x, other) && x.element_type() == other.element_type(), op,
              "a cotangent and a gradient of the type of x");
    }
    const Affine affine(op, parameters, args, 1, count, shape[0]);
    float* gradients[2] = {nullptr, nullptr};
    for (size_t i = 0; i < count; ++i) {
      const ffi::AnyBuffer gradient = **rets.get<ffi::AnyBuffer>(1 + i);
      require_type(op, "a gradient of a parameter", gradient, ffi::DataType::F32, "float32");
      REQUIRE(gradient.dimensions().size() == 1 && gradient.dimensions()[0] == shape[0], op,
              "a gradient of the shape of its parameter; got " + text(gradient.dimensions()));
      gradients[i] = gradient.typed_data<float>();
    }
    float* dweight = parameters.weight ? gradients[0] : nullptr;
    float* dbias = parameters.weight ? gradients[1] : gradients[0];
    const cpu::NormBackward call{dx.untyped_data(),   dweight,       dbias,    x.untyped_data(),        affine.weight,
                                 dout.untyped_data(), shape.batch(), shape[0], static_cast<float>(eps), center};
    cpu::kernels().norm_backward(element_of(op, x), call, executor_on(pool));
  });
}

ffi::Error rms_norm_backward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, double eps) {
  return norm_backward("rms_norm_backward", false, kWeight, pool, args, rets, eps);
}
ffi::Error layer_norm_backward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, double eps) {
  return norm_backward("layer_norm_backward", true, kWeightAndBias, pool, args, rets, eps);
}
ffi::Error layer_norm_bias_backward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                                    double eps) {
  return norm_backward("layer_norm_bias_backward", true, kBias, pool, args, rets, eps);
}

XLA_FFI_DEFINE_HANDLER(kRmsNormBackward, rms_norm_backward, variadic().Attr<double>("eps"));
XLA_FFI_DEFINE_HANDLER(kLayerNormBackward, layer_norm_backward, variadic().Attr<double>("eps"));
XLA_FFI_DEFINE_HANDLER(kLayerNormBiasBackward, layer_norm_bias_backward, variadic().Attr<double>("eps"));

}  // namespace

CpuOps norm_backward_ops() {
  return {{"rms_norm_backward", kRmsNormBackward},
          {"layer_norm_backward", kLayerNormBackward},
          {"layer_norm_bias_backward", kLayerNormBiasBackward}};
}

}  // namespace eqxcallback
