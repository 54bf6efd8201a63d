// Cross-entropy of a softmax, log(sum(exp(logits))) - logits[label], or with a target for each class, forward and
// backward.
//
// logits, dlogits [rows, size] of T; labels [rows] int32; targets, dtargets [rows, size] f32; loss, dloss [rows] f32,
// as all sums are. The edges are those of -jax.nn.log_softmax(logits)[label]: a negative label counts from the end; one
// outside of -size .. size - 1 makes the loss NaN and the gradient zero; inf among the logits, or nothing but -inf,
// makes NaN; -inf at the label alone makes inf.
//
// With options (kOptions), where l = log(sum(exp(logits))): the loss is (1 - label_smoothing) times that of the label,
// and label_smoothing times the mean of those of all classes, and z_loss * l^2. A row whose label is ignore_index has
// loss and gradient 0. Without them the instance is the plain kernel.
//
// Forward reads what it has once. So does backward from a label: with the loss of forward, the softmax is exp(logits -
// logits[label] - loss). Where the loss is so large that this is inexact, or not finite, or has other parts, it reads
// the logits once more before, for the sum; with targets always.
//
// The geometry of all kernels, where packs = ceil(size * sizeof(T) / 16): threads = clamp(32 * ceil(packs / 128), 32,
// 512), block (threads, threads == 32 ? 4 : 1), grid ceil(rows / block.y), no shared bytes. So a row of several warps
// has a block of its own, and meets one barrier for each sum. Of the largest blocks two are resident: one is on its way
// while the other is added up.
#include "../common.cuh"

namespace eqxcallback {

struct Row {
  long long index, label;  // label is -1 if it is none
  bool exists;             // threads of no row take part in the sums

  explicit __device__ Row(long long rows)
      : index(static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y), label(-1), exists(index < rows) {}
  __device__ Row(const int* labels, long long rows, long long size) : Row(rows) {
    if (!exists) return;
    label = labels[index];
    if (label < 0) label += size;
    if (label < 0 || label >= size) label = -1;
  }
};

constexpr int kThreads = 512, kBlocks = 2;

// What is known of some logits: the maximum, the sum of exp(logits - maximum), and if they are weighted, the sum of
// weights, and of weights * (maximum - logits). A logit of weight 0 may be hidden, and takes no part in the last one.
template <bool kWeighted>
struct Softmax {
  float highest = kLowest, sum = 0.0f, weight = 0.0f, below = 0.0f;

  // As if the maximum were `next`, which is not less.
  __device__ void raise(float next) {
    sum *= __expf(highest - next);
    if constexpr (kWeighted) {
      if (weight != 0.0f) below += weight * (next - highest);  // 0 * inf, where there is nothing yet
    }
    highest = next;
  }

  __device__ void join_warp() {
    raise(reduce_warp<Max>(highest));
    sum = reduce_warp<Add>(sum);
    if constexpr (kWeighted) {
      weight = reduce_warp<Add>(weight);
      below = reduce_warp<Add>(below);
    }
  }

  // Of the threads of a row. All threads of the block call it, once.
  __device__ void join_row() {
    __shared__ float4 of_warps[kThreads / 32];
    join_warp();
    const unsigned warps = blockDim.x / 32, lane = threadIdx.x % 32;
    if (warps == 1) return;
    if (lane == 0) of_warps[threadIdx.x / 32] = make_float4(highest, sum, weight, below);
    __syncthreads();
    const float4 other = lane < warps ? of_warps[lane] : make_float4(kLowest, 0.0f, 0.0f, 0.0f);
    highest = other.x, sum = other.y, weight = other.z, below = other.w;
    join_warp();
  }

  // z_loss times the square of log(sum(exp(logits))), if there is one.
  __device__ float penalty(float z_loss) const {
    const float total = highest + logf(sum);
    return z_loss == 0.0f ? 0.0f : z_loss * (total * total);
  }
};

// Of packs of logits and targets, fewer are on their way: there are no registers for more.
constexpr int kAheadOfTargets = 2;

// Weights are 1 where they are null.
template <bool kWeighted, int kAhead = 4, typename T>
__device__ inline Softmax<kWeighted> softmax_of(const T* logits, const Span<T>& span, const float* weights = nullptr) {
  Softmax<kWeighted> result;
  for_each<kAhead>(span, logits, [&](long long first, auto values, auto count) {
    constexpr int n = decltype(count)::value;
    float next = result.highest, part = 0.0f;
    for (const float value : values.at) next = fmaxf(next, value);
    result.raise(next);
    for (const float value : values.at) part += __expf(value - next);
    result.sum += part;
    if constexpr (kWeighted) {
      Floats<n> of_values;
      if (weights != nullptr) of_values = load_any<n>(weights + first);
#pragma unroll
      for (int e = 0; e < n; ++e) {
        const float weight = weights == nullptr ? 1.0f : of_values.at[e];
        result.weight += weight;
        if (weight != 0.0f) result.below += weight * (next - values.at[e]);
      }
    }
  });
  result.join_row();
  return result;
}

template <typename T, bool kOptions>
__global__ void __launch_bounds__(kThreads, kBlocks)
    cross_entropy(const T* logits, const int* labels, float* loss, long long rows, long long size,
                  float label_smoothing, float z_loss, long long ignore_index) {
  const Row row(labels, rows, size);
  if (row.exists) logits += row.index * size;
  const Span<T> span(row.exists ? size : 0, logits, logits);
  const auto softmax = softmax_of<kOptions>(logits, span);
  if (!row.exists || threadIdx.x != 0) return;
  // The maximum is subtracted first: it may be so large that the logarithm is lost in it.
  const float log_sum = logf(softmax.sum);
  float result = row.label < 0 ? nan_value() : log_sum - (to_float(logits[row.label]) - softmax.highest);
  if constexpr (kOptions) {
    if (label_smoothing != 0.0f) {
      const float mean = log_sum + softmax.below / static_cast<float>(size);
      result = (1.0f - label_smoothing) * result + label_smoothing * mean;
    }
    result += softmax.penalty(z_loss);
    if (labels[row.index] == ignore_index) result = 0.0f;
  }
  loss[row.index] = result;
}

// dlabels is null: integers have no gradient. With p = softmax(logits), s the smoothing and a = 1 - s, or 0 where there
// is no label: dlogits = dloss * ((a + s + 2 * z_loss * l) * p - s / size), and at the label another -dloss * a.
template <typename T, bool kOptions>
__global__ void __launch_bounds__(kThreads, kBlocks)
    cross_entropy_backward(const T* logits, const int* labels, const float* loss, const float* dloss, T* dlogits,
                           int* dlabels, long long rows, long long size, float label_smoothing, float z_loss,
                           long long ignore_index) {
  constexpr float kExact = 64.0f;  // a sum with it has an error of 4e-6
  const Row row(labels, rows, size);
  if (row.exists) {
    logits += row.index * size;
    dlogits += row.index * size;
  }
  const Span<T> span(row.exists ? size : 0, logits, dlogits);
  const bool is_plain = !kOptions || (label_smoothing == 0.0f && z_loss == 0.0f);
  float base = 0.0f, log_sum = 0.0f;
  if (row.label >= 0) {
    base = to_float(logits[row.label]);
    log_sum = loss[row.index];
  }
  if (!is_plain || !(log_sum < kExact)) {  // all threads that meet a barrier have one row
    const auto softmax = softmax_of<false>(logits, span);
    base = softmax.highest;
    log_sum = logf(softmax.sum);
  }
  const float scale = (kOptions ? row.exists : row.label >= 0) ? dloss[row.index] : 0.0f;
  bool is_zero = row.label < 0;
  float factor = 0.0f, of_label = 0.0f, of_each = 0.0f;
  if constexpr (kOptions) {
    is_zero = (is_zero && is_plain) || (row.exists && labels[row.index] == ignore_index);
    of_label = row.label < 0 ? 0.0f : scale * (1.0f - label_smoothing);
    of_each = scale * label_smoothing / static_cast<float>(size);
    factor = of_label + scale * label_smoothing;
    if (z_loss != 0.0f) factor += scale * 2.0f * z_loss * (base + log_sum);
  }
  for_each(span, logits, [&](long long first, auto values, auto count) {
#pragma unroll
    for (int e = 0; e < decltype(count)::value; ++e) {
      const float probability = __expf(values.at[e] - base - log_sum);
      if constexpr (kOptions) {
        const float gradient = factor * probability - of_each - (first + e == row.label ? of_label : 0.0f);
        values.at[e] = is_zero ? 0.0f : gradient;
      } else {
        values.at[e] = is_zero ? 0.0f : scale * (probability - (first + e == row.label ? 1.0f : 0.0f));
      }
    }
    store(dlogits + first, values);
  });
}

// The sum of targets * (l - logits), and z_loss * l^2. A class without a target takes no part, and may be hidden by a
// logit of -inf.
template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocks)
    cross_entropy_of_targets(const T* logits, const float* targets, float* loss, long long rows, long long size,
                             float z_loss) {
  const Row row(rows);
  if (row.exists) {
    logits += row.index * size;
    targets += row.index * size;
  }
  const Span<T> span(row.exists ? size : 0, logits, logits);
  const auto softmax = softmax_of<true, kAheadOfTargets>(logits, span, targets);
  if (!row.exists || threadIdx.x != 0) return;
  // The logarithm of an empty sum times no weight is no number.
  const float of_targets = size > 0 ? softmax.weight * logf(softmax.sum) + softmax.below : 0.0f;
  loss[row.index] = of_targets + softmax.penalty(z_loss);
}

// dlogits = dloss * ((sum(targets) + 2 * z_loss * l) * p - targets), dtargets = dloss * (l - logits), or 0 where there
// is no target and a logit of -inf. One that is not needed is null. `loss` is not read.
template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocks)
    cross_entropy_of_targets_backward(const T* logits, const float* targets, const float* loss, const float* dloss,
                                      T* dlogits, float* dtargets, long long rows, long long size, float z_loss) {
  const Row row(rows);
  const long long offset = row.exists ? row.index * size : 0;
  logits += offset;
  targets += offset;
  Span<T> span(row.exists ? size : 0, logits, logits);
  if (dlogits != nullptr) span = Span<T>(row.exists ? size : 0, logits, dlogits + offset);
  const auto softmax = softmax_of<true, kAheadOfTargets>(logits, span, targets);
  const float log_sum = logf(softmax.sum), scale = row.exists ? dloss[row.index] : 0.0f;
  float factor = softmax.weight;
  if (z_loss != 0.0f) factor += 2.0f * z_loss * (softmax.highest + log_sum);
  for_each<kAheadOfTargets>(span, logits, [&](long long first, auto values, auto count) {
    constexpr int n = decltype(count)::value;
    const Floats<n> weights = load_any<n>(targets + first);
    Floats<n> of_targets;
#pragma unroll
    for (int e = 0; e < n; ++e) {
      const float below = log_sum - (values.at[e] - softmax.highest);
      of_targets.at[e] = weights.at[e] == 0.0f && below > -kLowest ? 0.0f : scale * below;
      values.at[e] = scale * (factor * __expf(-below) - weights.at[e]);
    }
    if (dlogits != nullptr) store(dlogits + offset + first, values);
    if (dtargets != nullptr) store_any(dtargets + offset + first, of_targets);
  });
}

}  // namespace eqxcallback
