// The handlers of the gates of recurrent cells.
#include "ffi/cpu_call.h"

namespace eqxcallback {
namespace {

// True if `gates` has `count` parts for each row of `state`.
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
      REQUIRE(same_type(cell, other), op, "results of the type of cell");
    }
    const cpu::LstmGates call{hidden->untyped_data(), new_cell->untyped_data(),
                              gates.untyped_data(),   cell.untyped_data(),
                              shape.batch(),          shape[0]};
    cpu::kernels().lstm_gates(element_of(op, cell), call, executor_on(pool));
  });
}

// -- gru_gates: input_gates and hidden_gates [*batch, 3 size], hidden [*batch, size], bias f32 [size], which may be
// absent

struct GruOperands {
  Operands operands;
  ffi::AnyBuffer input, recurrent, hidden;
  Optional bias;
  Shape shape;
  const float* bias_data;

  // `others`: the number of results and cotangents that follow, for a backward kernel.
  GruOperands(const char* op, const ffi::RemainingArgs& args, int64_t present, size_t others)
      : operands(op, args, present, {"input_gates", "hidden_gates", "hidden", "bias"}, 3, others),
        input(operands[0]),
        recurrent(operands[1]),
        hidden(operands[2]),
        bias(operands(3)),
        shape(op, "hidden", hidden, 1),
        bias_data(vector_of(op, "a bias", bias, shape[0])) {
    const Shape in(op, "input_gates", input, 1);
    REQUIRE(has_parts(input, in, hidden, shape, 3) && same_type(input, recurrent), op,
            "gates of shape (*batch, 3 * size) and hidden of shape (*batch, size), of one dtype; got " +
                text(input.dimensions()) + ", " + text(recurrent.dimensions()) + " and " + text(hidden.dimensions()));
  }

  cpu::GruGates call(void* out) const {
    return {out,     input.untyped_data(), recurrent.untyped_data(), hidden.untyped_data(), bias_data, shape.batch(),
            shape[0]};
  }
};

ffi::Error gru_gates(ffi::ThreadPool pool, ffi::RemainingArgs args, Out out, int64_t present) {
  return guarded([&] {
    constexpr const char* op = "gru_gates";
    const GruOperands in(op, args, present, 0);
    REQUIRE(same_type(in.hidden, *out), op, "a result of the type of hidden");
    cpu::kernels().gru_gates(element_of(op, in.hidden), in.call(out->untyped_data()), executor_on(pool));
  });
}

// -- lstm_gates_backward: gates, cell, the two results, their cotangents -> the gradients of gates and cell

ffi::Error lstm_gates_backward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t present,
                               int64_t needs_grad) {
  return guarded([&] {
    constexpr const char* op = "lstm_gates_backward";
    const Operands operands(op, args, present, {"gates", "cell"}, 2, 4);
    const Gradients gradients(op, rets, needs_grad, 2);
    const ffi::AnyBuffer gates = operands[0], cell = operands[1];
    const ffi::AnyBuffer dhidden = operands.other(2), dnew_cell = operands.other(3);
    const Shape in(op, "gates", gates, 1), shape(op, "cell", cell, 1);
    REQUIRE(has_parts(gates, in, cell, shape, 4), op,
            "gates of shape (*batch, 4 * size) and cell of shape (*batch, size), of one dtype; got " +
                text(gates.dimensions()) + " and " + text(cell.dimensions()));
    REQUIRE(same_type(cell, dhidden) && same_type(cell, dnew_cell), op, "cotangents of the type of cell");
    const cpu::LstmGatesBackward call{
        data_of(gradients(0, gates)),
        data_of(gradients(1, cell)),
        {nullptr, nullptr, gates.untyped_data(), cell.untyped_data(), shape.batch(), shape[0]},
        dhidden.untyped_data(),
        dnew_cell.untyped_data()};
    cpu::kernels().lstm_gates_backward(element_of(op, cell), call, executor_on(pool));
  });
}

// -- gru_gates_backward: the operands, the result, its cotangent -> the gradients of the operands

ffi::Error gru_gates_backward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t present,
                              int64_t needs_grad) {
  return guarded([&] {
    constexpr const char* op = "gru_gates_backward";
    const GruOperands in(op, args, present, 2);
    const Gradients gradients(op, rets, needs_grad, 4);
    const ffi::AnyBuffer dout = in.operands.other(1);
    REQUIRE(same_type(in.hidden, dout), op, "a cotangent of the type of hidden");
    const cpu::GruGatesBackward call{data_of(gradients(0, in.input)),
                                     data_of(gradients(1, in.recurrent)),
                                     data_of(gradients(2, in.hidden)),
                                     static_cast<float*>(data_of(gradients(3, in.bias))),
                                     in.call(nullptr),
                                     dout.untyped_data()};
    cpu::kernels().gru_gates_backward(element_of(op, in.hidden), call, executor_on(pool));
  });
}

EQXCALLBACK_CPU_KERNEL(lstm_gates, lstm_gates,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // gates
                           .Arg<ffi::AnyBuffer>()  // cell
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>());
EQXCALLBACK_CPU_KERNEL(gru_gates, gru_gates, bind_forward());
EQXCALLBACK_CPU_KERNEL(lstm_gates_backward, lstm_gates_backward, bind_backward());
EQXCALLBACK_CPU_KERNEL(gru_gates_backward, gru_gates_backward, bind_backward());

}  // namespace
}  // namespace eqxcallback
