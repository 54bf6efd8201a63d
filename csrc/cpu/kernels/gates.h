// What recurrent cells do after their products: LSTM (https://www.bioinf.jku.at/publications/older/2604.pdf) and GRU
// (https://arxiv.org/abs/1406.1078).
#pragma once

#include "cpu/kernels/math.h"

namespace eqxcallback::cpu {
namespace {

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
          const F enter = sigmoid(load(gates + i, count)), keep = sigmoid(load(gates + size + i, count));
          const F candidate = tanh(load(gates + 2 * size + i, count));
          const F next = Simd::fma(keep, load(cell + i, count), Simd::mul(enter, candidate));
          store(new_cell + i, next, count);
          store(hidden + i, Simd::mul(sigmoid(load(gates + 3 * size + i, count)), tanh(next)), count);
        });
      }
    });
  });
}

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
          const auto both = [&](int64_t at) { return Simd::add(load(in + at, count), load(of_hidden + at, count)); };
          const F reset = sigmoid(both(i)), update = sigmoid(both(size + i));
          F recurrent = load(of_hidden + 2 * size + i, count);
          if (args.bias != nullptr) recurrent = Simd::add(recurrent, load(args.bias + i, count));
          const F next = tanh(Simd::fma(reset, recurrent, load(in + 2 * size + i, count)));
          store(out + i, Simd::fma(update, Simd::sub(load(hidden + i, count), next), next), count);
        });
      }
    });
  });
}

}  // namespace
}  // namespace eqxcallback::cpu
