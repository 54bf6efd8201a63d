// The handlers of normalisation. Weights and biases are f32, and may be absent.
#include "ffi/cpu_call.h"

namespace eqxcallback {
namespace {

// -- norm: x [*batch, size], weight [size], bias [size]. Centred it is a layer norm, else an RMS norm

ffi::Error norm(ffi::ThreadPool pool, ffi::RemainingArgs args, Out out, int64_t present, double eps, bool center) {
  return guarded([&] {
    constexpr const char* op = "norm";
    const Operands operands(op, args, present, {"x", "weight", "bias"}, 1);
    const ffi::AnyBuffer x = operands[0];
    const Shape shape(op, "x", x, 1);
    REQUIRE(same_type(x, *out), op, "a result of the type of x");
    const cpu::Norm call{out->untyped_data(),
                         x.untyped_data(),
                         vector_of(op, "a weight", operands(1), shape[0]),
                         vector_of(op, "a bias", operands(2), shape[0]),
                         shape.batch(),
                         shape[0],
                         static_cast<float>(eps),
                         center};
    cpu::kernels().norm(element_of(op, x), call, executor_on(pool));
  });
}

// -- group_norm: x [*batch, channels, size], weight [channels], bias [channels]

cpu::GroupNorm group_norm_of(const char* op, const Operands& operands, double eps, int64_t groups) {
  const ffi::AnyBuffer x = operands[0];
  const Shape shape(op, "x", x, 2);
  REQUIRE(groups > 0 && shape[0] % groups == 0, op,
          "groups that divide " + std::to_string(shape[0]) + " channels; got " + std::to_string(groups));
  return {nullptr,
          x.untyped_data(),
          vector_of(op, "a weight", operands(1), shape[0]),
          vector_of(op, "a bias", operands(2), shape[0]),
          shape.batch(),
          shape[0],
          shape[1],
          groups,
          static_cast<float>(eps)};
}

ffi::Error group_norm(ffi::ThreadPool pool, ffi::RemainingArgs args, Out out, int64_t present, double eps,
                      int64_t groups) {
  return guarded([&] {
    constexpr const char* op = "group_norm";
    const Operands operands(op, args, present, {"x", "weight", "bias"}, 1);
    REQUIRE(same_type(operands[0], *out), op, "a result of the type of x");
    cpu::GroupNorm call = group_norm_of(op, operands, eps, groups);
    call.out = out->untyped_data();
    cpu::kernels().group_norm(element_of(op, operands[0]), call, executor_on(pool));
  });
}

// -- group_norm_backward: the operands, the result, its cotangent -> the gradients of x, weight and bias, summed over
// the batch

ffi::Error group_norm_backward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t present,
                               int64_t needs_grad, double eps, int64_t groups) {
  return guarded([&] {
    constexpr const char* op = "group_norm_backward";
    const Operands operands(op, args, present, {"x", "weight", "bias"}, 1, 2);
    const Gradients gradients(op, rets, needs_grad, 3);
    const ffi::AnyBuffer x = operands[0], dout = operands.other(1);
    REQUIRE(same_type(x, dout), op, "a cotangent of the type of x");
    const cpu::GroupNormBackward call{data_of(gradients(0, x)), static_cast<float*>(data_of(gradients(1, operands(1)))),
                                      static_cast<float*>(data_of(gradients(2, operands(2)))),
                                      group_norm_of(op, operands, eps, groups), dout.untyped_data()};
    cpu::kernels().group_norm_backward(element_of(op, x), call, executor_on(pool));
  });
}

// -- add_rms_norm: x and residual [*batch, size], weight [size] -> the norm, the sum

ffi::Error add_rms_norm(ffi::ThreadPool pool, ffi::RemainingArgs args, Out out, Out sum, int64_t present, double eps) {
  return guarded([&] {
    constexpr const char* op = "add_rms_norm";
    const Operands operands(op, args, present, {"x", "residual", "weight"}, 2);
    const ffi::AnyBuffer x = operands[0], residual = operands[1];
    const Shape shape(op, "x", x, 1);
    REQUIRE(same_type(x, residual) && same_type(x, *out) && same_type(x, *sum), op,
            "residual and results of the type of x");
    const cpu::AddRmsNorm call{out->untyped_data(),
                               sum->untyped_data(),
                               x.untyped_data(),
                               residual.untyped_data(),
                               vector_of(op, "a weight", operands(2), shape[0]),
                               shape.batch(),
                               shape[0],
                               static_cast<float>(eps)};
    cpu::kernels().add_rms_norm(element_of(op, x), call, executor_on(pool));
  });
}

// -- norm_backward: the operands, the result, its cotangent -> the gradients of x, weight and bias, summed over the
// batch

ffi::Error norm_backward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t present,
                         int64_t needs_grad, double eps, bool center) {
  return guarded([&] {
    constexpr const char* op = "norm_backward";
    const Operands operands(op, args, present, {"x", "weight", "bias"}, 1, 2);
    const Gradients gradients(op, rets, needs_grad, 3);
    const ffi::AnyBuffer x = operands[0], dout = operands.other(1);
    const Optional weight = operands(1), bias = operands(2);
    const Shape shape(op, "x", x, 1);
    REQUIRE(same_type(x, dout), op, "a cotangent of the type of x");
    vector_of(op, "a bias", bias, shape[0]);
    const Optional dx = gradients(0, x), dweight = gradients(1, weight), dbias = gradients(2, bias);
    const cpu::NormBackward call{data_of(dx),
                                 static_cast<float*>(data_of(dweight)),
                                 static_cast<float*>(data_of(dbias)),
                                 x.untyped_data(),
                                 vector_of(op, "a weight", weight, shape[0]),
                                 dout.untyped_data(),
                                 shape.batch(),
                                 shape[0],
                                 static_cast<float>(eps),
                                 center};
    cpu::kernels().norm_backward(element_of(op, x), call, executor_on(pool));
  });
}

EQXCALLBACK_CPU_KERNEL(norm, norm, bind_forward().Attr<double>("eps").Attr<bool>("center"));
EQXCALLBACK_CPU_KERNEL(norm_backward, norm_backward, bind_backward().Attr<double>("eps").Attr<bool>("center"));
EQXCALLBACK_CPU_KERNEL(group_norm, group_norm, bind_forward().Attr<double>("eps").Attr<int64_t>("groups"));
EQXCALLBACK_CPU_KERNEL(group_norm_backward, group_norm_backward,
                       bind_backward().Attr<double>("eps").Attr<int64_t>("groups"));
EQXCALLBACK_CPU_KERNEL(add_rms_norm, add_rms_norm,
                       optional_operands()
                           .Ret<ffi::AnyBuffer>()  // the norm
                           .Ret<ffi::AnyBuffer>()  // the sum
                           .Attr<int64_t>("present")
                           .Attr<double>("eps"));

}  // namespace
}  // namespace eqxcallback
