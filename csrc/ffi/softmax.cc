// The handlers of softmax.
#include "ffi/cpu_call.h"

namespace eqxcallback {
namespace {

// Checks the mask, bool [*batch, size], which may lack some of the first batch axes of x.
cpu::RowMask mask_of(const char* op, const Optional& mask, const ffi::AnyBuffer& x) {
  if (!mask) return {nullptr, 1};
  require_type(op, "a mask", *mask, ffi::DataType::PRED, "bool");
  const Shape of_mask(op, "a mask", *mask, 1), shape(op, "x", x, 1);
  REQUIRE(of_mask.shared_by(shape) && of_mask[0] == shape[0], op,
          "a mask of the last axes of x, of shape " + text(shape.dims) + "; got " + text(of_mask.dims));
  return {mask->untyped_data(), of_mask.batch()};
}

// -- x [*batch, size], mask -> the same as x

ffi::Error softmax(ffi::ThreadPool pool, ffi::RemainingArgs args, Out out, int64_t present, double scale) {
  return guarded([&] {
    constexpr const char* op = "softmax";
    const Operands operands(op, args, present, {"x", "mask"}, 1);
    const ffi::AnyBuffer x = operands[0];
    const Shape shape(op, "x", x, 1);
    REQUIRE(same_type(x, *out), op, "a result of the type of x");
    const cpu::Softmax call{out->untyped_data(), x.untyped_data(), mask_of(op, operands(1), x),
                            shape.batch(),       shape[0],         static_cast<float>(scale)};
    cpu::kernels().softmax(element_of(op, x), call, executor_on(pool));
  });
}

// -- x, mask, the result, its cotangent -> the gradient of x

ffi::Error softmax_backward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t present,
                            int64_t needs_grad, double scale) {
  return guarded([&] {
    constexpr const char* op = "softmax_backward";
    const Operands operands(op, args, present, {"x", "mask"}, 1, 2);
    const Gradients gradients(op, rets, needs_grad, 2, 2);
    const ffi::AnyBuffer x = operands[0], y = operands.other(0), dout = operands.other(1);
    const Shape shape(op, "x", x, 1);
    REQUIRE(same_type(x, y) && same_type(x, dout), op, "a result and a cotangent of the type of x");
    const cpu::SoftmaxBackward call{data_of(gradients(0, x)),
                                    {y.untyped_data(), x.untyped_data(), mask_of(op, operands(1), x), shape.batch(),
                                     shape[0], static_cast<float>(scale)},
                                    dout.untyped_data()};
    cpu::kernels().softmax_backward(element_of(op, x), call, executor_on(pool));
  });
}

EQXCALLBACK_CPU_KERNEL(softmax, softmax, bind_forward().Attr<double>("scale"));
EQXCALLBACK_CPU_KERNEL(softmax_backward, softmax_backward, bind_backward().Attr<double>("scale"));

}  // namespace
}  // namespace eqxcallback
