// What recurrent cells do after their products: LSTM (https://www.bioinf.jku.at/publications/older/2604.pdf) and GRU
// (https://arxiv.org/abs/1406.1078), and the gradients, which compute the gates anew: nothing but the operands is kept.
//
// Of T: cell, hidden and all results [rows, size]; gates [rows, 4 * size], the input, forget, candidate and output gate
// after each other; input_gates, hidden_gates [rows, 3 * size], reset, update and candidate. bias, dbias [size] f32, or
// null. A gradient that is not needed is null.
//
// The geometry of all kernels but the last: block (32, 8), grid (ceil(units / 32), parts), no shared bytes, where units
// = size / n if n = 16 / sizeof(T) divides size, else size, and parts = max(1, min(ceil(rows / 8), 1056 / grid.x)):
// what is resident at a time on 132 multiprocessors. Any grid is right, except that the gradient of a bias needs the
// parts for which it has memory.
#include "../common.cuh"

namespace eqxcallback {

// body(row, column, sums) for the share of this thread of all packs of n columns; and done(column, sums) after the rows
// of a pack, which all threads of the block call together: those beyond the last column with one that is too large.
template <int n, typename Body, typename Done>
__device__ inline void for_each_pack(long long rows, long long size, Body body, Done done) {
  const long long step = static_cast<long long>(gridDim.y) * blockDim.y, width = static_cast<long long>(blockDim.x) * n;
  for (long long first = blockIdx.x * width; first < size; first += gridDim.x * width) {
    const long long c = first + threadIdx.x * n, from = static_cast<long long>(blockIdx.y) * blockDim.y + threadIdx.y;
    Floats<n> sums = {};
    for (long long r = from; r < (c < size ? rows : 0); r += step) body(r, c, sums);
    done(c, sums);
  }
}
template <int n, typename Body>
__device__ inline void for_each_pack(long long rows, long long size, Body body) {
  for_each_pack<n>(rows, size, [&](long long r, long long c, Floats<n>&) { body(r, c); }, [](auto...) {});
}

template <typename T, typename... Arrays>
__device__ inline bool has_packs(long long size, const Arrays*... arrays) {
  return size % kPack<T> == 0 && (is_aligned(arrays) && ...);
}

// The gradients of what y is the sigmoid, or the hyperbolic tangent, of.
__device__ inline float before_sigmoid(float upstream, float y) { return upstream * (y * (1.0f - y)); }
__device__ inline float before_tanh(float upstream, float y) { return upstream * (1.0f - y * y); }

template <typename T>
struct LstmStep {
  float input, forget, candidate, output, next;

  __device__ LstmStep(float input_gate, float forget_gate, float candidate_gate, float output_gate, float cell)
      : input(sigmoid<T>(input_gate)),
        forget(sigmoid<T>(forget_gate)),
        candidate(tanhf(candidate_gate)),
        output(sigmoid<T>(output_gate)),
        next(forget * cell + input * candidate) {}
};

template <int n, typename T>
__device__ inline void lstm(const T* gates, const T* cell, T* hidden, T* new_cell, long long rows, long long size) {
  for_each_pack<n>(rows, size, [&](long long r, long long c) {
    const T* from = gates + r * 4 * size + c;
    const long long at = r * size + c;
    const Floats<n> input = load<n>(from), forget = load<n>(from + size), candidate = load<n>(from + 2 * size);
    const Floats<n> output = load<n>(from + 3 * size), old = load<n>(cell + at);
    Floats<n> next, seen;
#pragma unroll
    for (int e = 0; e < n; ++e) {
      const LstmStep<T> step(input.at[e], forget.at[e], candidate.at[e], output.at[e], old.at[e]);
      next.at[e] = step.next;
      seen.at[e] = step.output * tanhf(step.next);
    }
    store(hidden + at, seen);
    store(new_cell + at, next);
  });
}

template <typename T>
__global__ void __launch_bounds__(256, 2)
    lstm_gates(const T* gates, const T* cell, T* hidden, T* new_cell, long long rows, long long size) {
  if (has_packs<T>(size, gates, cell, hidden, new_cell)) {
    lstm<kPack<T>>(gates, cell, hidden, new_cell, rows, size);
  } else {
    lstm<1>(gates, cell, hidden, new_cell, rows, size);
  }
}

template <int n, typename T>
__device__ inline void lstm_backward(const T* gates, const T* cell, const T* dhidden, const T* dnew_cell, T* dgates,
                                     T* dcell, long long rows, long long size) {
  for_each_pack<n>(rows, size, [&](long long r, long long c) {
    const long long first = r * 4 * size + c, at = r * size + c;
    Floats<n> gate[4];
#pragma unroll
    for (int g = 0; g < 4; ++g) gate[g] = load<n>(gates + first + g * size);
    Floats<n> old = load<n>(cell + at);
    const Floats<n> of_hidden = load<n>(dhidden + at), of_cell = load<n>(dnew_cell + at);
#pragma unroll
    for (int e = 0; e < n; ++e) {
      const LstmStep<T> step(gate[0].at[e], gate[1].at[e], gate[2].at[e], gate[3].at[e], old.at[e]);
      const float seen = tanhf(step.next), upstream = of_hidden.at[e];
      const float dnext = of_cell.at[e] + before_tanh(upstream * step.output, seen);
      gate[0].at[e] = before_sigmoid(dnext * step.candidate, step.input);
      gate[1].at[e] = before_sigmoid(dnext * old.at[e], step.forget);
      gate[2].at[e] = before_tanh(dnext * step.input, step.candidate);
      gate[3].at[e] = before_sigmoid(upstream * seen, step.output);
      old.at[e] = dnext * step.forget;
    }
    if (dcell != nullptr) store(dcell + at, old);
    if (dgates == nullptr) return;
#pragma unroll
    for (int g = 0; g < 4; ++g) store(dgates + first + g * size, gate[g]);
  });
}

// hidden and new_cell are not read.
template <typename T>
__global__ void __launch_bounds__(256, 2)
    lstm_gates_backward(const T* gates, const T* cell, const T* hidden, const T* new_cell, const T* dhidden,
                        const T* dnew_cell, T* dgates, T* dcell, long long rows, long long size) {
  if (has_packs<T>(size, gates, cell, dhidden, dnew_cell, dgates, dcell)) {
    lstm_backward<kPack<T>>(gates, cell, dhidden, dnew_cell, dgates, dcell, rows, size);
  } else {
    lstm_backward<1>(gates, cell, dhidden, dnew_cell, dgates, dcell, rows, size);
  }
}

// The operands of n columns of a row.
template <int n>
struct GruOperands {
  Floats<n> input[3], of_hidden[3];

  template <typename T>
  __device__ GruOperands(const T* input_gates, const T* hidden_gates, const float* bias, long long size) {
#pragma unroll
    for (int g = 0; g < 3; ++g) {
      input[g] = load<n>(input_gates + g * size);
      of_hidden[g] = load<n>(hidden_gates + g * size);
    }
    if (bias == nullptr) return;
    const Floats<n> added = load_any<n>(bias);
#pragma unroll
    for (int e = 0; e < n; ++e) of_hidden[2].at[e] += added.at[e];
  }
};

template <typename T>
struct GruStep {
  float reset, update, recurrent, next;

  template <int n>
  __device__ GruStep(const GruOperands<n>& of, int e)
      : reset(sigmoid<T>(of.input[0].at[e] + of.of_hidden[0].at[e])),
        update(sigmoid<T>(of.input[1].at[e] + of.of_hidden[1].at[e])),
        recurrent(of.of_hidden[2].at[e]),
        next(tanhf(of.input[2].at[e] + reset * recurrent)) {}
};

template <int n, typename T>
__device__ inline void gru(const T* input_gates, const T* hidden_gates, const T* hidden, const float* bias, T* out,
                           long long rows, long long size) {
  for_each_pack<n>(rows, size, [&](long long r, long long c) {
    const long long first = r * 3 * size + c, at = r * size + c;
    const GruOperands<n> of(input_gates + first, hidden_gates + first, bias == nullptr ? bias : bias + c, size);
    Floats<n> values = load<n>(hidden + at);
#pragma unroll
    for (int e = 0; e < n; ++e) {
      const GruStep<T> step(of, e);
      values.at[e] = step.next + step.update * (values.at[e] - step.next);
    }
    store(out + at, values);
  });
}

template <typename T>
__global__ void __launch_bounds__(256, 2) gru_gates(const T* input_gates, const T* hidden_gates, const T* hidden,
                                                    const float* bias, T* out, long long rows, long long size) {
  if (has_packs<T>(size, input_gates, hidden_gates, hidden, out)) {
    gru<kPack<T>>(input_gates, hidden_gates, hidden, bias, out, rows, size);
  } else {
    gru<1>(input_gates, hidden_gates, hidden, bias, out, rows, size);
  }
}

// What the threads of the same column have, added up and written by one of them. The block is (32, 8).
template <int n>
__device__ inline void write_sums(float* to, long long column, long long size, Floats<n> sums) {
  __shared__ float of_threads[8][32][n];
  __syncthreads();  // all have read those of the last time
#pragma unroll
  for (int e = 0; e < n; ++e) of_threads[threadIdx.y][threadIdx.x][e] = sums.at[e];
  __syncthreads();
  if (threadIdx.y != 0 || column >= size) return;
  for (int y = 1; y < 8; ++y) {
#pragma unroll
    for (int e = 0; e < n; ++e) sums.at[e] += of_threads[y][threadIdx.x][e];
  }
  store_any(to + column, sums);
}

template <int n, typename T>
__device__ inline void gru_backward(const T* input_gates, const T* hidden_gates, const T* hidden, const float* bias,
                                    const T* dout, T* dinput_gates, T* dhidden_gates, T* dhidden, float* of_bias,
                                    long long rows, long long size) {
  const auto of_row = [&](long long r, long long c, Floats<n>& sums) {
    const long long first = r * 3 * size + c, at = r * size + c;
    const GruOperands<n> of(input_gates + first, hidden_gates + first, bias == nullptr ? bias : bias + c, size);
    const Floats<n> upstream = load<n>(dout + at);
    Floats<n> old = load<n>(hidden + at), dreset, dupdate, dnext, drecurrent;
#pragma unroll
    for (int e = 0; e < n; ++e) {
      const GruStep<T> step(of, e);
      const float kept = upstream.at[e] * step.update;
      dnext.at[e] = before_tanh(upstream.at[e] - kept, step.next);
      drecurrent.at[e] = dnext.at[e] * step.reset;
      dreset.at[e] = before_sigmoid(dnext.at[e] * step.recurrent, step.reset);
      dupdate.at[e] = before_sigmoid(upstream.at[e] * (old.at[e] - step.next), step.update);
      old.at[e] = kept;
      sums.at[e] += drecurrent.at[e];
    }
    const auto put = [&](T* to, const Floats<n>& last) {
      if (to == nullptr) return;
      store(to + first, dreset);
      store(to + first + size, dupdate);
      store(to + first + 2 * size, last);
    };
    put(dinput_gates, dnext);
    put(dhidden_gates, drecurrent);
    if (dhidden != nullptr) store(dhidden + at, old);
  };
  for_each_pack<n>(rows, size, of_row, [&](long long c, const Floats<n>& sums) {
    if (of_bias != nullptr) write_sums(of_bias, c, size, sums);
  });
}

// `out` is not read. Where dbias is needed, a second launch adds up the sums over the rows of each part, which are in
// the workspace `parts` [grid.y, size] f32.
template <typename T>
__global__ void __launch_bounds__(256, 2)
    gru_gates_backward(const T* input_gates, const T* hidden_gates, const T* hidden, const float* bias, const T* out,
                       const T* dout, T* dinput_gates, T* dhidden_gates, T* dhidden, float* dbias, float* parts,
                       long long rows, long long size, long long num_parts) {
  float* const of_bias = dbias == nullptr ? nullptr : parts + blockIdx.y * size;
  const bool packs = has_packs<T>(size, input_gates, hidden_gates, hidden, dout, dinput_gates, dhidden_gates, dhidden);
  if (packs) {
    gru_backward<kPack<T>>(input_gates, hidden_gates, hidden, bias, dout, dinput_gates, dhidden_gates, dhidden, of_bias,
                           rows, size);
  } else {
    gru_backward<1>(input_gates, hidden_gates, hidden, bias, dout, dinput_gates, dhidden_gates, dhidden, of_bias, rows,
                    size);
  }
}

// dbias, where it is needed. Block (32, 8), grid ceil(size / 32), no shared bytes.
template <typename T>
__global__ void __launch_bounds__(256)
    gru_gates_backward_sum(const T* input_gates, const T* hidden_gates, const T* hidden, const float* bias,
                           const T* out, const T* dout, T* dinput_gates, T* dhidden_gates, T* dhidden, float* dbias,
                           float* parts, long long rows, long long size, long long num_parts) {
  sum_parts(parts, dbias, size, size, num_parts);
}

}  // namespace eqxcallback
