// Softmax of scale * x over the last axis, forward and backward.
//
// x, out, dx [rows, size] of T; mask [mask_rows, size] bytes that are 0 or 1, of which row r has r % mask_rows: null,
// and all elements take part. Sums are f32. What does not take part is 0, may be anything, and has no gradient. The
// edges are those of jax.nn.softmax: NaN or an infinite logit among what takes part, or nothing but -inf, makes a row
// NaN; a row of which nothing takes part is 0.
//
// Forward reads a row twice, the second time from cache: once for the largest element and the sum that is relative to
// it, and once for the quotients. Backward reads the result and dout twice in the same way.
//
// The geometry of both kernels, where packs = ceil(size * sizeof(T) / 16): threads = clamp(32 * ceil(packs / 128), 32,
// 1024), block (threads, max(1, 128 / threads)), grid ceil(rows / block.y), no shared bytes.
#include "../common.cuh"

namespace eqxcallback {

struct Row {
  long long index;
  bool exists;  // threads of no row take part in the sums

  explicit __device__ Row(long long rows)
      : index(static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y), exists(index < rows) {
    if (!exists) index = 0;
  }
};

__device__ inline const unsigned char* mask_row(const unsigned char* mask, const Row& row, long long mask_rows,
                                                long long size) {
  return mask + (row.index - divide(row.index, mask_rows) * mask_rows) * size;
}

template <typename T, bool kMask>
__global__ void __launch_bounds__(1024, 1) softmax(const T* x, const unsigned char* mask, T* out, long long rows,
                                                   long long mask_rows, long long size, float scale) {
  const Row row(rows);
  x += row.index * size;
  out += row.index * size;
  if constexpr (kMask) mask = mask_row(mask, row, mask_rows, size);
  const Span<T> span(row.exists ? size : 0, x, out);
  const float sign = scale < 0.0f ? -1.0f : 1.0f, factor = scale * sign;
  const auto takes_part = [&](long long i) { return !kMask || mask[i] != 0; };

  // Of x with the sign of the scale: the largest number, and the sum of the powers relative to it. The difference comes
  // before the product, which then does not overflow.
  float highest[1] = {kLowest}, sum[1] = {0.0f};
  for_each(span, x, [&](long long first, auto values, auto count) {
    constexpr int n = decltype(count)::value;
    float next = highest[0], part = 0.0f;
#pragma unroll
    for (int e = 0; e < n; ++e) {
      values.at[e] *= sign;
      if (takes_part(first + e)) next = fmaxf(next, values.at[e]);
    }
#pragma unroll
    for (int e = 0; e < n; ++e) {
      if (takes_part(first + e)) part += __expf((values.at[e] - next) * factor);
    }
    sum[0] = sum[0] * __expf((highest[0] - next) * factor) + part;
    highest[0] = next;
  });
  const float own = highest[0];
  reduce_row<Max>(highest);
  sum[0] *= __expf((own - highest[0]) * factor);
  reduce_row<Add>(sum);
  const float inverse = 1.0f / sum[0];  // of nothing but -inf it is infinite, and makes NaN of 0
  for_each(span, x, [&](long long first, auto values, auto count) {
#pragma unroll
    for (int e = 0; e < decltype(count)::value; ++e) {
      const float power = __expf((values.at[e] * sign - highest[0]) * factor);
      values.at[e] = takes_part(first + e) ? power * inverse : 0.0f;
    }
    store(out + first, values);
  });
}

// dx = scale * out * (dout - mean), where the mean of dout has the weights out. It is divided by their sum, which is 1
// but for the rounding of out: so a dout that is the same everywhere leaves nothing, in 16 bits too. x is not read.
// dmask is null: bools have no gradient.
template <typename T, bool kMask>
__global__ void __launch_bounds__(1024, 1)
    softmax_backward(const T* x, const unsigned char* mask, const T* out, const T* dout, T* dx, unsigned char* dmask,
                     long long rows, long long mask_rows, long long size, float scale) {
  const Row row(rows);
  out += row.index * size;
  dout += row.index * size;
  dx += row.index * size;
  if constexpr (kMask) mask = mask_row(mask, row, mask_rows, size);
  const auto takes_part = [&](long long i) { return !kMask || mask[i] != 0; };
  Span<T> span(row.exists ? size : 0, out, dout);
  const Span<T> both(row.exists ? size : 0, out, dx);
  if (both.packs < span.packs) span = both;

  float sums[2] = {0.0f, 0.0f};  // of the products, and of the weights
  for_each(span, out, [&](long long first, auto values, auto count) {
    constexpr int n = decltype(count)::value;
    const Floats<n> upstream = load<n>(dout + first);
#pragma unroll
    for (int e = 0; e < n; ++e) {
      if (!takes_part(first + e)) continue;
      sums[0] += values.at[e] * upstream.at[e];
      sums[1] += values.at[e];
    }
  });
  reduce_row<Add>(sums);
  // The weights are 0 where nothing takes part, and where all results of a long row are too small for f16.
  const float mean = sums[1] == 0.0f ? 0.0f : sums[0] / sums[1];
  for_each(span, out, [&](long long first, auto values, auto count) {
    constexpr int n = decltype(count)::value;
    const Floats<n> upstream = load<n>(dout + first);
#pragma unroll
    for (int e = 0; e < n; ++e) {
      values.at[e] = takes_part(first + e) ? scale * values.at[e] * (upstream.at[e] - mean) : 0.0f;
    }
    store(dx + first, values);
  });
}

}  // namespace eqxcallback
