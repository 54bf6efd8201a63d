// The gates of recurrent cells, after their products: LSTM (https://www.bioinf.jku.at/publications/older/2604.pdf) and
// GRU (https://arxiv.org/abs/1406.1078). The gradients compute the gates anew, so that only the operands are kept.
#pragma once

#include "cpu/kernels/math.h"
#include "cpu/kernels/row_sums.h"

namespace eqxcallback::cpu {
namespace {

// The gates of a step, and what they make of the cell.
struct LstmStep {
  F input_gate, forget_gate, candidate, output_gate, cell, next;

  template <class T, class Count>
  LstmStep(const T* gates, const T* cells, int64_t size, int64_t i, Count count)
      : input_gate(sigmoid(load(gates + i, count))),
        forget_gate(sigmoid(load(gates + size + i, count))),
        candidate(tanh(load(gates + 2 * size + i, count))),
        output_gate(sigmoid(load(gates + 3 * size + i, count))),
        cell(load(cells + i, count)),
        next(Simd::fma(forget_gate, cell, Simd::mul(input_gate, candidate))) {}
};

void lstm_gates(Element element, const LstmGates& args, const Executor& executor) {
  with_type(element, [&](auto* type) {
    using T = Pointee<decltype(type)>;
    const int64_t size = args.size;
    parallel_for(executor, args.rows, static_cast<double>(size) * 1.0 + 5, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* gates = static_cast<const T*>(args.gates) + r * 4 * size;
        const T* cell = static_cast<const T*>(args.cell) + r * size;
        T* hidden = static_cast<T*>(args.hidden) + r * size;
        T* new_cell = static_cast<T*>(args.new_cell) + r * size;
        for_vectors(size, [&](int64_t i, auto count) {
          const LstmStep step(gates, cell, size, i, count);
          store(new_cell + i, step.next, count);
          store(hidden + i, Simd::mul(step.output_gate, tanh(step.next)), count);
        });
      }
    });
  });
}

// upstream * y (1 - y), the gradient of the x of which y is the sigmoid.
F before_sigmoid(F upstream, F y) { return Simd::mul(upstream, Simd::fma(Simd::sub(Simd::zero(), y), y, y)); }
// upstream * (1 - y^2), the gradient of the x of which y is the hyperbolic tangent.
F before_tanh(F upstream, F y) {
  return Simd::mul(upstream, Simd::fma(Simd::sub(Simd::zero(), y), y, Simd::broadcast(1)));
}

void lstm_gates_backward(Element element, const LstmGatesBackward& args, const Executor& executor) {
  with_type(element, [&](auto* type) {
    using T = Pointee<decltype(type)>;
    const int64_t size = args.forward.size;
    parallel_for(executor, args.forward.rows, static_cast<double>(size) * 1.5 + 5, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* gates = static_cast<const T*>(args.forward.gates) + r * 4 * size;
        const T* cell = static_cast<const T*>(args.forward.cell) + r * size;
        const T* dhidden = static_cast<const T*>(args.dhidden) + r * size;
        const T* dnew_cell = static_cast<const T*>(args.dnew_cell) + r * size;
        T* dgates = args.dgates == nullptr ? nullptr : static_cast<T*>(args.dgates) + r * 4 * size;
        T* dcell = args.dcell == nullptr ? nullptr : static_cast<T*>(args.dcell) + r * size;
        for_vectors(size, [&](int64_t i, auto count) {
          const LstmStep step(gates, cell, size, i, count);
          const F upstream = load(dhidden + i, count), seen = tanh(step.next);
          const F dnext =
              Simd::add(load(dnew_cell + i, count), before_tanh(Simd::mul(upstream, step.output_gate), seen));
          if (dcell != nullptr) store(dcell + i, Simd::mul(dnext, step.forget_gate), count);
          if (dgates == nullptr) return;
          store(dgates + i, before_sigmoid(Simd::mul(dnext, step.candidate), step.input_gate), count);
          store(dgates + size + i, before_sigmoid(Simd::mul(dnext, step.cell), step.forget_gate), count);
          store(dgates + 2 * size + i, before_tanh(Simd::mul(dnext, step.input_gate), step.candidate), count);
          store(dgates + 3 * size + i, before_sigmoid(Simd::mul(upstream, seen), step.output_gate), count);
        });
      }
    });
  });
}

struct GruStep {
  F reset, update, recurrent, next;

  template <class T, class Count>
  GruStep(const T* in, const T* of_hidden, const float* bias, int64_t size, int64_t i, Count count) {
    const auto both = [&](int64_t at) { return Simd::add(load(in + at, count), load(of_hidden + at, count)); };
    reset = sigmoid(both(i)), update = sigmoid(both(size + i));
    recurrent = load(of_hidden + 2 * size + i, count);
    if (bias != nullptr) recurrent = Simd::add(recurrent, load(bias + i, count));
    next = tanh(Simd::fma(reset, recurrent, load(in + 2 * size + i, count)));
  }
};

void gru_gates(Element element, const GruGates& args, const Executor& executor) {
  with_type(element, [&](auto* type) {
    using T = Pointee<decltype(type)>;
    const int64_t size = args.size;
    parallel_for(executor, args.rows, static_cast<double>(size) * 0.8 + 5, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* in = static_cast<const T*>(args.input_gates) + r * 3 * size;
        const T* of_hidden = static_cast<const T*>(args.hidden_gates) + r * 3 * size;
        const T* hidden = static_cast<const T*>(args.hidden) + r * size;
        T* out = static_cast<T*>(args.out) + r * size;
        for_vectors(size, [&](int64_t i, auto count) {
          const GruStep step(in, of_hidden, args.bias, size, i, count);
          store(out + i, Simd::fma(step.update, Simd::sub(load(hidden + i, count), step.next), step.next), count);
        });
      }
    });
  });
}

void gru_gates_backward(Element element, const GruGatesBackward& args, const Executor& executor) {
  with_type(element, [&](auto* type) {
    using T = Pointee<decltype(type)>;
    const GruGates& of = args.forward;
    const int64_t size = of.size;
    const auto row = [&](void* data, int64_t at) { return data == nullptr ? nullptr : static_cast<T*>(data) + at; };
    sum_rows({args.dbias}, of.rows, size, static_cast<double>(size) * 1.2 + 5, executor,
             [&](int64_t begin, int64_t end, float* const(&sums)[1]) {
               for (int64_t r = begin; r < end; ++r) {
                 const T* in = static_cast<const T*>(of.input_gates) + r * 3 * size;
                 const T* of_hidden = static_cast<const T*>(of.hidden_gates) + r * 3 * size;
                 const T* hidden = static_cast<const T*>(of.hidden) + r * size;
                 const T* dout = static_cast<const T*>(args.dout) + r * size;
                 T* din = row(args.dinput_gates, r * 3 * size);
                 T* dof_hidden = row(args.dhidden_gates, r * 3 * size);
                 T* dhidden = row(args.dhidden, r * size);
                 for_vectors(size, [&](int64_t i, auto count) {
                   const GruStep step(in, of_hidden, of.bias, size, i, count);
                   const F upstream = load(dout + i, count), kept = Simd::mul(upstream, step.update);
                   const F dnext = before_tanh(Simd::sub(upstream, kept), step.next);
                   const F drecurrent = Simd::mul(dnext, step.reset);
                   const F dreset = before_sigmoid(Simd::mul(dnext, step.recurrent), step.reset);
                   const F dupdate =
                       before_sigmoid(Simd::mul(upstream, Simd::sub(load(hidden + i, count), step.next)), step.update);
                   const auto put = [&](T* to, F last) {
                     if (to == nullptr) return;
                     store(to + i, dreset, count);
                     store(to + size + i, dupdate, count);
                     store(to + 2 * size + i, last, count);
                   };
                   put(din, dnext);
                   put(dof_hidden, drecurrent);
                   if (dhidden != nullptr) store(dhidden + i, kept, count);
                   if (sums[0] != nullptr) store(sums[0] + i, Simd::add(load(sums[0] + i, count), drecurrent), count);
                 });
               }
             });
  });
}

}  // namespace
}  // namespace eqxcallback::cpu
