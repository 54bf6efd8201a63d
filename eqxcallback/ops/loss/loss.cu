// Cross-entropy of a softmax with integer labels, log(sum(exp(logits))) - logits[label], forward and backward.
//
// logits, dlogits [rows, size] of T; labels [rows] int32; loss, dloss [rows] f32, as all sums are. The edges are those
// of -jax.nn.log_softmax(logits)[label]: a negative label counts from the end; one outside of -size .. size - 1 makes
// the loss NaN and the gradient zero; inf among the logits, or nothing but -inf, makes NaN; -inf at the label alone
// makes inf.
//
// Forward reads the logits once. So does backward: with the loss of forward, the softmax is exp(logits - logits[label]
// - loss). Where the loss is so large that this is inexact, or not finite, it computes the sum again first.
//
// The geometry of both kernels, where packs = ceil(size * sizeof(T) / 16): threads = clamp(32 * ceil(packs / 128), 32,
// 1024), block (threads, max(1, 128 / threads)), grid ceil(rows / block.y), no shared bytes.
#include "../common.cuh"

namespace eqxcallback {

struct Row {
  long long index, label;  // label is -1 if it is none
  bool exists;             // threads of no row take part in the sums

  __device__ Row(const int* labels, long long rows, long long size)
      : index(static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y), label(-1), exists(index < rows) {
    if (!exists) return;
    label = labels[index];
    if (label < 0) label += size;
    if (label < 0 || label >= size) label = -1;
  }
};

// The maximum of a row, and the sum of exp(logits - maximum).
struct Softmax {
  float highest, sum;
};

template <typename T>
__device__ inline Softmax softmax_of(const T* logits, const Span<T>& span) {
  float highest[1] = {kLowest}, sum[1] = {0.0f};
  for_each(span, logits, [&](long long, auto values, auto) {
    float next = highest[0];
    for (const float value : values.at) next = fmaxf(next, value);
    float part = 0.0f;
    for (const float value : values.at) part += __expf(value - next);
    sum[0] = sum[0] * __expf(highest[0] - next) + part;
    highest[0] = next;
  });
  const float own = highest[0];
  reduce_row<Max>(highest);
  sum[0] *= __expf(own - highest[0]);
  reduce_row<Add>(sum);
  return {highest[0], sum[0]};
}

template <typename T>
__global__ void __launch_bounds__(1024, 1)
    cross_entropy(const T* logits, const int* labels, float* loss, long long rows, long long size) {
  const Row row(labels, rows, size);
  if (row.exists) logits += row.index * size;
  const Span<T> span(row.exists ? size : 0, logits, logits);
  const Softmax softmax = softmax_of(logits, span);
  if (!row.exists || threadIdx.x != 0) return;
  // The maximum is subtracted first: it may be so large that the logarithm is lost in it.
  loss[row.index] = row.label < 0 ? nan_value() : logf(softmax.sum) - (to_float(logits[row.label]) - softmax.highest);
}

// dlabels is null: integers have no gradient.
template <typename T>
__global__ void __launch_bounds__(1024, 1)
    cross_entropy_backward(const T* logits, const int* labels, const float* loss, const float* dloss, T* dlogits,
                           int* dlabels, long long rows, long long size) {
  constexpr float kExact = 64.0f;  // a sum with it has an error of 4e-6
  const Row row(labels, rows, size);
  if (row.exists) {
    logits += row.index * size;
    dlogits += row.index * size;
  }
  const Span<T> span(row.exists ? size : 0, logits, dlogits);
  float base = 0.0f, log_sum = 0.0f;
  if (row.label >= 0) {
    base = to_float(logits[row.label]);
    log_sum = loss[row.index];
  }
  if (__syncthreads_or(!(log_sum < kExact))) {
    const Softmax softmax = softmax_of(logits, span);
    base = softmax.highest;
    log_sum = logf(softmax.sum);
  }
  const float scale = row.label >= 0 ? dloss[row.index] : 0.0f;
  for_each(span, logits, [&](long long first, auto values, auto count) {
#pragma unroll
    for (int e = 0; e < decltype(count)::value; ++e) {
      const float probability = __expf(values.at[e] - base - log_sum);
      values.at[e] = row.label < 0 ? 0.0f : scale * (probability - (first + e == row.label ? 1.0f : 0.0f));
    }
    store(dlogits + first, values);
  });
}

}  // namespace eqxcallback
