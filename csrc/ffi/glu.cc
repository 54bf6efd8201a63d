// The handlers of activations, x of any shape, and of gated linear units, gate and up [*batch, size]. Without up, the
// gate is [*batch, 2 size] and has both halves, the gate first.
#include <string_view>

#include "ffi/cpu_call.h"

namespace eqxcallback {
namespace {

cpu::Activation activation_of(const char* op, std::string_view name) {
  if (name == "silu") return cpu::Activation::kSilu;
  if (name == "gelu") return cpu::Activation::kGelu;
  REQUIRE(name == "gelu_tanh", op, "the activation silu, gelu or gelu_tanh; got " + std::string(name));
  return cpu::Activation::kGeluTanh;
}

// Returns where the second half begins, in rows of `size` elements.
void* after(void* first, int64_t size, cpu::Element element) {
  return first == nullptr ? nullptr : static_cast<char*>(first) + size * cpu::bytes_of(element);
}

// The shape that gate and up share with `result`, a result or a cotangent.
struct Gated {
  cpu::Element element;
  void *gate, *up;
  int64_t rows, size, stride;

  Gated(const char* op, const ffi::AnyBuffer& first, const Optional& second, const char* name,
        const ffi::AnyBuffer& result)
      : element(element_of(op, first)), gate(first.untyped_data()) {
    const Shape in(op, "gate", first, 1), out(op, name, result, 1);
    rows = out.batch(), size = out[0], stride = in[0];
    REQUIRE(stride == (second ? 1 : 2) * size && in.same_batch(out) && first.element_type() == result.element_type(),
            op,
            std::string(name) + " that matches the operands; got " + text(result.dimensions()) + " for " +
                text(first.dimensions()));
    REQUIRE(
        !second || same_type(first, *second), op,
        "gate and up of one shape and dtype; got " + text(first.dimensions()) + " and " + text(second->dimensions()));
    up = second ? second->untyped_data() : after(gate, size, element);
  }
};

ffi::Error glu(ffi::ThreadPool pool, ffi::RemainingArgs args, Out out, int64_t present, std::string_view activation) {
  return guarded([&] {
    constexpr const char* op = "glu";
    const Operands operands(op, args, present, {"gate", "up"}, 1);
    const Gated in(op, operands[0], operands(1), "a result", *out);
    const cpu::Glu call{out->untyped_data(),          in.gate, in.up, in.rows, in.size, in.stride,
                        activation_of(op, activation)};
    cpu::kernels().glu(in.element, call, executor_on(pool));
  });
}

// -- the operands, the result, its cotangent -> the gradients of gate and up

ffi::Error glu_backward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t present,
                        int64_t needs_grad, std::string_view activation) {
  return guarded([&] {
    constexpr const char* op = "glu_backward";
    const Operands operands(op, args, present, {"gate", "up"}, 1, 2);
    const Gradients gradients(op, rets, needs_grad, 2);
    const ffi::AnyBuffer gate = operands[0], dout = operands.other(1);
    const Optional up = operands(1);
    const Gated in(op, gate, up, "a cotangent", dout);
    void *dgate = data_of(gradients(0, gate)), *dup = data_of(gradients(1, up));
    if (!up) dup = after(dgate, in.size, in.element);
    const cpu::GluBackward call{
        dgate, dup, in.gate, in.up, dout.untyped_data(), in.rows, in.size, in.stride, activation_of(op, activation)};
    cpu::kernels().glu_backward(in.element, call, executor_on(pool));
  });
}

// -- x -> the same as x

ffi::Error gelu(ffi::ThreadPool pool, ffi::RemainingArgs args, Out out, int64_t present, std::string_view activation) {
  return guarded([&] {
    constexpr const char* op = "gelu";
    const ffi::AnyBuffer x = Operands(op, args, present, {"x"}, 1)[0];
    REQUIRE(same_type(x, *out), op, "a result of the type of x");
    const cpu::Gelu call{out->untyped_data(), x.untyped_data(), static_cast<int64_t>(x.element_count()),
                         activation_of(op, activation)};
    cpu::kernels().gelu(element_of(op, x), call, executor_on(pool));
  });
}

// -- x, the result, its cotangent -> the gradient of x

ffi::Error gelu_backward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t present,
                         int64_t needs_grad, std::string_view activation) {
  return guarded([&] {
    constexpr const char* op = "gelu_backward";
    const Operands operands(op, args, present, {"x"}, 1, 2);
    const ffi::AnyBuffer x = operands[0], dout = operands.other(1);
    REQUIRE(same_type(x, dout), op, "a cotangent of the type of x");
    const Optional dx = Gradients(op, rets, needs_grad, 1)(0, x);
    if (!dx) return;
    const cpu::GeluBackward call{dx->untyped_data(), x.untyped_data(), dout.untyped_data(),
                                 static_cast<int64_t>(x.element_count()), activation_of(op, activation)};
    cpu::kernels().gelu_backward(element_of(op, x), call, executor_on(pool));
  });
}

EQXCALLBACK_CPU_KERNEL(gelu, gelu, bind_forward().Attr<std::string_view>("activation"));
EQXCALLBACK_CPU_KERNEL(gelu_backward, gelu_backward, bind_backward().Attr<std::string_view>("activation"));
EQXCALLBACK_CPU_KERNEL(glu, glu, bind_forward().Attr<std::string_view>("activation"));
EQXCALLBACK_CPU_KERNEL(glu_backward, glu_backward, bind_backward().Attr<std::string_view>("activation"));

}  // namespace
}  // namespace eqxcallback
