// The handlers of the gates of recurrent cells.
#include "ffi/cpu_call.h"

namespace eqxcallback {
namespace {

// Whether `gates` has `count` parts for each row of `state`.
bool has_parts(const ffi::AnyBuffer& gates, const Shape& in, const ffi::AnyBuffer& state, const Shape& shape,
               int64_t count) {
  return in[0] == count * shape[0] && in.same_batch(shape) && gates.element_type() == state.element_type();
}

// -- lstm_gates: gates [*batch, 4 size], cell [*batch, size] -> hidden, cell

ffi::Error lstm_gates(ffi::ThreadPool pool, ffi::AnyBuffer gates, ffi::AnyBuffer cell, Out hidden, Out new_cell) {
  return guarded([&] {
    constexpr const char* op = "lstm_gates";
    const Shape in(op, "gates", gates, 1), shape(op, "cell", cell, 1);
    REQUIRE(has_parts(gates, in, cell, shape, 4), op,
            "gates of shape (*batch, 4 * size) and cell of shape (*batch, size), of one dtype; got " +
                text(gates.dimensions()) + " and " + text(cell.dimensions()));
    for (const ffi::AnyBuffer& other : {*hidden, *new_cell}) {
      REQUIRE(same_shape(cell, other) && cell.element_type() == other.element_type(), op,
              "results of the type of cell");
    }
    const cpu::LstmGates call{hidden->untyped_data(), new_cell->untyped_data(),
                              gates.untyped_data(),   cell.untyped_data(),
                              shape.batch(),          shape[0]};
    cpu::kernels().lstm_gates(element_of(op, cell), call, executor_on(pool));
  });
}

// -- gru_gates: input_gates and hidden_gates [*batch, 3 size], hidden [*batch, size], bias f32 [size] or none

ffi::Error gru_gates(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return guarded([&] {
    constexpr const char* op = "gru_gates";
    REQUIRE((args.size() == 3 || args.size() == 4) && rets.size() == 1, op, "three or four operands and one result");
    const ffi::AnyBuffer input = *args.get<ffi::AnyBuffer>(0), recurrent = *args.get<ffi::AnyBuffer>(1);
    const ffi::AnyBuffer hidden = *args.get<ffi::AnyBuffer>(2), out = **rets.get<ffi::AnyBuffer>(0);
    const Shape in(op, "input_gates", input, 1), shape(op, "hidden", hidden, 1);
    REQUIRE(has_parts(input, in, hidden, shape, 3) && same_shape(input, recurrent) &&
                input.element_type() == recurrent.element_type(),
            op,
            "gates of shape (*batch, 3 * size) and hidden of shape (*batch, size), of one dtype; got " +
                text(input.dimensions()) + ", " + text(recurrent.dimensions()) + " and " + text(hidden.dimensions()));
    REQUIRE(same_shape(hidden, out) && hidden.element_type() == out.element_type(), op,
            "a result of the type of hidden");
    const float* bias = nullptr;
    if (args.size() == 4) {
      const ffi::AnyBuffer b = *args.get<ffi::AnyBuffer>(3);
      require_type(op, "a bias", b, ffi::DataType::F32, "float32");
      REQUIRE(b.dimensions().size() == 1 && b.dimensions()[0] == shape[0], op,
              "a bias of shape (" + std::to_string(shape[0]) + ",); got " + text(b.dimensions()));
      bias = b.typed_data<float>();
    }
    const cpu::GruGates call{out.untyped_data(),
                             input.untyped_data(),
                             recurrent.untyped_data(),
                             hidden.untyped_data(),
                             bias,
                             shape.batch(),
                             shape[0]};
    cpu::kernels().gru_gates(element_of(op, hidden), call, executor_on(pool));
  });
}

XLA_FFI_DEFINE_HANDLER(kLstmGates, lstm_gates,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // gates
                           .Arg<ffi::AnyBuffer>()  // cell
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kGruGates, gru_gates, variadic());

}  // namespace

CpuOps recurrent_ops() { return {{"lstm_gates", kLstmGates}, {"gru_gates", kGruGates}}; }

}  // namespace eqxcallback
