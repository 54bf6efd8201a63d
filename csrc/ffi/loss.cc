// The handlers of losses.
#include <string_view>

#include "cpu/processor.h"
#include "ffi/cpu_call.h"

namespace eqxcallback {
namespace {

// -- softmax_cross_entropy: logits [*batch, size], labels s32 [*batch] -> f32 [*batch]

cpu::CrossEntropy cross_entropy_call(const char* op, const ffi::AnyBuffer& logits, const ffi::AnyBuffer& labels,
                                     const ffi::AnyBuffer& loss, const ffi::Dictionary& options) {
  const Shape in(op, "logits", logits, 1), of_labels(op, "labels", labels, 0), result(op, "the loss", loss, 0);
  require_type(op, "labels", labels, ffi::DataType::S32, "int32");
  require_type(op, "the loss", loss, ffi::DataType::F32, "float32");
  REQUIRE(of_labels.same_batch(in) && result.same_batch(in), op,
          "a label and a loss for each row of the logits of shape " + text(logits.dimensions()) + "; got " +
              text(labels.dimensions()) + " and " + text(loss.dimensions()));
  size_t known = 0;
  const auto number = [&](std::string_view name) {
    if (!options.contains(name)) return 0.0f;
    ++known;
    const auto value = options.get<double>(name);
    REQUIRE(value.has_value(), op, std::string(name) + " to be an attribute of type double");
    return static_cast<float>(*value);
  };
  cpu::CrossEntropy call{
      loss.typed_data<float>(),  logits.untyped_data(), labels.typed_data<int32_t>(),     in.batch(), in[0],
      number("label_smoothing"), number("z_loss"),      options.contains("ignore_index"), 0};
  call.prefetching = cpu::prefetching();
  if (call.has_ignore_index) {
    ++known;
    const auto value = options.get<int64_t>("ignore_index");
    REQUIRE(value.has_value(), op, "ignore_index to be an attribute of type int64");
    call.ignore_index = *value;
  }
  REQUIRE(known == options.size(), op, "no other attribute than label_smoothing, z_loss and ignore_index");
  return call;
}

ffi::Error softmax_cross_entropy(ffi::ThreadPool pool, ffi::AnyBuffer logits, ffi::AnyBuffer labels, Out loss,
                                 ffi::Dictionary options) {
  return guarded([&] {
    constexpr const char* op = "softmax_cross_entropy";
    const cpu::CrossEntropy call = cross_entropy_call(op, logits, labels, *loss, options);
    cpu::kernels().cross_entropy(element_of(op, logits), call, executor_on(pool));
  });
}

// -- logits, labels, the loss, its cotangent -> the gradient of the logits

ffi::Error softmax_cross_entropy_backward(ffi::ThreadPool pool, ffi::AnyBuffer logits, ffi::AnyBuffer labels,
                                          ffi::AnyBuffer loss, ffi::AnyBuffer dloss, Out dlogits,
                                          ffi::Dictionary options) {
  return guarded([&] {
    constexpr const char* op = "softmax_cross_entropy_backward";
    const cpu::CrossEntropy forward = cross_entropy_call(op, logits, labels, loss, options);
    require_type(op, "the cotangent", dloss, ffi::DataType::F32, "float32");
    REQUIRE(same_shape(loss, dloss) && same_shape(logits, *dlogits) && logits.element_type() == dlogits->element_type(),
            op, "a cotangent of the type of the loss, and a gradient of that of the logits");
    const cpu::CrossEntropyBackward call{dlogits->untyped_data(), forward, dloss.typed_data<float>()};
    cpu::kernels().cross_entropy_backward(element_of(op, logits), call, executor_on(pool));
  });
}

EQXCALLBACK_CPU_KERNEL(softmax_cross_entropy, softmax_cross_entropy,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // logits
                           .Arg<ffi::AnyBuffer>()  // labels
                           .Ret<ffi::AnyBuffer>()
                           .Attrs());
EQXCALLBACK_CPU_KERNEL(softmax_cross_entropy_backward, softmax_cross_entropy_backward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // logits
                           .Arg<ffi::AnyBuffer>()  // labels
                           .Arg<ffi::AnyBuffer>()  // the loss
                           .Arg<ffi::AnyBuffer>()  // its cotangent
                           .Ret<ffi::AnyBuffer>()
                           .Attrs());

}  // namespace
}  // namespace eqxcallback
