// The handlers of gated linear units: gate and up [*batch, size]; or both in one operand [*batch, 2 size], the gate
// first.
#include "ffi/cpu_call.h"

namespace eqxcallback {
namespace {

// The gate and up among operands, or among their gradients.
struct Pair {
  char *gate, *up;
  cpu::Element element;
  bool fits = true;

  Pair(const char* op, const ffi::AnyBuffer& first, const ffi::AnyBuffer* second, int64_t size)
      : gate(static_cast<char*>(first.untyped_data())), element(element_of(op, first)) {
    if (second == nullptr) {
      up = gate + size * cpu::bytes_of(element);
    } else {
      fits = same_shape(first, *second) && first.element_type() == second->element_type();
      up = static_cast<char*>(second->untyped_data());
    }
  }
};

ffi::Error glu(const char* op, cpu::Activation activation, ffi::ThreadPool pool, ffi::RemainingArgs args,
               ffi::RemainingRets rets) {
  return guarded([&] {
    REQUIRE((args.size() == 1 || args.size() == 2) && rets.size() == 1, op, "one or two operands and one result");
    const ffi::AnyBuffer gate = *args.get<ffi::AnyBuffer>(0), out = **rets.get<ffi::AnyBuffer>(0);
    const bool packed = args.size() == 1;
    const ffi::AnyBuffer up = packed ? gate : *args.get<ffi::AnyBuffer>(1);
    const Shape in(op, "gate", gate, 1), result(op, "the result", out, 1);
    REQUIRE(in[0] == (packed ? 2 : 1) * result[0] && in.same_batch(result) && gate.element_type() == out.element_type(),
            op,
            "a result that matches the operands; got " + text(out.dimensions()) + " for " + text(gate.dimensions()));
    const Pair pair(op, gate, packed ? nullptr : &up, result[0]);
    REQUIRE(pair.fits, op,
            "gate and up of one shape and dtype; got " + text(gate.dimensions()) + " and " + text(up.dimensions()));
    const cpu::Glu call{out.untyped_data(), pair.gate, pair.up, result.batch(), result[0], in[0], activation};
    cpu::kernels().glu(pair.element, call, executor_on(pool));
  });
}

// -- the operands, the result, its cotangent -> the gradients of the operands

ffi::Error glu_backward(const char* op, cpu::Activation activation, ffi::ThreadPool pool, ffi::RemainingArgs args,
                        ffi::RemainingRets rets) {
  return guarded([&] {
    REQUIRE((rets.size() == 1 || rets.size() == 2) && args.size() == rets.size() + 2, op,
            "one or two operands, the result and its cotangent, and a result for each operand");
    const bool packed = rets.size() == 1;
    const ffi::AnyBuffer gate = *args.get<ffi::AnyBuffer>(0), up = packed ? gate : *args.get<ffi::AnyBuffer>(1);
    const ffi::AnyBuffer dout = *args.get<ffi::AnyBuffer>(args.size() - 1), dgate = **rets.get<ffi::AnyBuffer>(0);
    const ffi::AnyBuffer dup = packed ? dgate : **rets.get<ffi::AnyBuffer>(1);
    const Shape in(op, "gate", gate, 1), result(op, "the cotangent", dout, 1);
    REQUIRE(
        in[0] == (packed ? 2 : 1) * result[0] && in.same_batch(result) && gate.element_type() == dout.element_type(),
        op,
        "a cotangent that matches the operands; got " + text(dout.dimensions()) + " for " + text(gate.dimensions()));
    const Pair operands(op, gate, packed ? nullptr : &up, result[0]);
    const Pair gradients(op, dgate, packed ? nullptr : &dup, result[0]);
    REQUIRE(operands.fits && gradients.fits && same_shape(gate, dgate) && operands.element == gradients.element, op,
            "gradients of the type of the operands");
    const cpu::GluBackward call{gradients.gate, gradients.up, operands.gate, operands.up, dout.untyped_data(),
                                result.batch(), result[0],    in[0],         activation};
    cpu::kernels().glu_backward(operands.element, call, executor_on(pool));
  });
}

cpu::Activation gelu(bool approximate) { return approximate ? cpu::Activation::kGeluTanh : cpu::Activation::kGelu; }

ffi::Error swiglu(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return glu("swiglu", cpu::Activation::kSilu, pool, args, rets);
}
ffi::Error swiglu_backward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return glu_backward("swiglu_backward", cpu::Activation::kSilu, pool, args, rets);
}
ffi::Error geglu(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, bool approximate) {
  return glu("geglu", gelu(approximate), pool, args, rets);
}
ffi::Error geglu_backward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, bool approximate) {
  return glu_backward("geglu_backward", gelu(approximate), pool, args, rets);
}

XLA_FFI_DEFINE_HANDLER(kSwiglu, swiglu, variadic());
XLA_FFI_DEFINE_HANDLER(kSwigluBackward, swiglu_backward, variadic());
XLA_FFI_DEFINE_HANDLER(kGeglu, geglu, variadic().Attr<bool>("approximate"));
XLA_FFI_DEFINE_HANDLER(kGegluBackward, geglu_backward, variadic().Attr<bool>("approximate"));

}  // namespace

CpuOps glu_ops() {
  return {
      {"swiglu", kSwiglu}, {"swiglu_backward", kSwigluBackward}, {"geglu", kGeglu}, {"geglu_backward", kGegluBackward}};
}

}  // namespace eqxcallback
