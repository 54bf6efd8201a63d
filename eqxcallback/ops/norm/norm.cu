// RMS norm (https://arxiv.org/abs/1910.07467) and layer norm (https://arxiv.org/abs/1607.06450), and RMS norm of the
// sum of two arrays, forward and backward.
//
// x, residual, total, out [rows, size] of T; weight, bias [size] f32, each null if there is none; sums are f32. Nothing
// is kept for backward: the statistics of a row are computed again, from what has to be read anyway. A row is read
// once: its first kPacks packs of each thread stay in registers, what is beyond is read again, from cache.
//
// The geometry of all kernels, where packs = ceil(size * sizeof(T) / 16):
//   forward   threads = clamp(32 * ceil(packs / 128), 32, 512), block (threads, max(1, 128 / threads)),
//             grid ceil(rows / block.y)
//   backward  threads = clamp(32 * ceil(packs / 64), 32, 512), block (threads, max(1, 256 / threads)), grid
//             parts = max(1, min(ceil(rows / block.y), multiprocessors * max(1, floor(768 / (threads * block.y))))):
//             what is resident at a time
// Any other number of threads of a row, a multiple of 32, is right, and any number of parts.
#include "norm.cuh"

namespace eqxcallback {

// The rest of a forward kernel, after its rows are loaded. kAhead: `scales` has what it can of `weight`.
template <bool kCenter, bool kWeight, bool kBias, bool kAhead, typename In, typename T>
__device__ inline void normalize_rows(const In& in, const typename In::Beside& scales, const float* weight,
                                      const float* bias, T* out, long long size, float eps) {
  const Scaling scaling = scaling_of_row<kCenter>(in, size, eps);
  in.for_each([&](const auto& elements, auto count) {
    constexpr int n = decltype(count)::value;
    Floats<n> values = elements.row[0], scale, shift;
    if constexpr (kWeight) {
      if constexpr (kAhead && n == kPack<T>) {
        scale = elements.kept >= 0 ? scales.packs[elements.kept] : load_any<n>(weight + elements.first);
      } else {
        scale = load_any<n>(weight + elements.first);
      }
    }
    if constexpr (kBias) shift = load_any<n>(bias + elements.first);
#pragma unroll
    for (int e = 0; e < n; ++e) {
      values.at[e] = (values.at[e] * scaling.factor - scaling.mean) * scaling.inverse;
      if constexpr (kWeight) values.at[e] *= scale.at[e];
      if constexpr (kBias) values.at[e] += shift.at[e];
    }
    store(out + elements.first, values);
  });
}

// Forward. kCenter: layer norm, else RMS norm. Without kWeight, `weight` is null, and likewise for the bias. No shared
// bytes. kAhead: the weight is read together with x, and not when the sums are there: where rows are few, reading twice
// is most of the time, and where they are many, its registers would cost resident blocks.
template <typename T, bool kCenter, bool kWeight, bool kBias, bool kAhead>
__global__ void __launch_bounds__(512, 1)
    normalize(const T* x, const float* weight, const float* bias, T* out, long long rows, long long size, float eps) {
  const long long row = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool exists = row < rows;  // threads of no row take part in the sums
  const long long offset = exists ? row * size : 0;
  const Span<T> span(exists ? size : 0, x + offset, out + offset);
  using In = Rows<T, 1, 4>;
  const In in(span, {x + offset});
  typename In::Beside scales;
  if constexpr (kAhead && kWeight) scales = in.beside(weight);
  normalize_rows<kCenter, kWeight, kBias, kAhead>(in, scales, weight, bias, out + offset, size, eps);
}

// The same for the RMS norm of x + residual, which is written to `total`, rounded, and normalized as it is there.
template <typename T, bool kWeight, bool kAhead>
__global__ void __launch_bounds__(kAhead ? 512 : 768, 1)
    add_normalize(const T* x, const T* residual, const float* weight, T* out, T* total, long long rows, long long size,
                  float eps) {
  const long long row = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool exists = row < rows;
  const long long offset = exists ? row * size : 0;
  const Span<T> span = span_of(exists ? size : 0, x + offset, residual + offset, out + offset, total + offset);
  using In = Rows<T, 1, 4>;
  In in(span, {x + offset});
  typename In::Beside scales;
  if constexpr (kAhead && kWeight) scales = in.beside(weight);
  in.add(residual + offset, total + offset);
  normalize_rows<false, kWeight, false, kAhead>(in, scales, weight, nullptr, out + offset, size, eps);
}

// The sums over rows of dweight and dbias: those of a block in shared memory while there is room, which is then
// [block.y, sums, size] f32, and else where they end up, in parts [grid, sums, size], for which block.y is 1.

// dx, and the sums of a block for dweight and dbias: see normalize_backward. A `more` that is not null is added to dx,
// and a `dother` that is not null is the same as dx.
template <bool kCenter, bool kWeight, bool kWeightSum, bool kBiasSum, typename T>
__device__ inline void backward_of_rows(const T* x, const float* weight, const T* dout, const T* more, T* dx, T* dother,
                                        float* parts, long long rows, long long size, long long shared_bytes,
                                        float eps) {
  constexpr int kSums = int{kWeightSum} + int{kBiasSum};
  DYN_SHARED(float, shared);
  const bool fits = blockDim.y * kSums * size * 4 <= shared_bytes;
  float* const of_block = parts + blockIdx.x * kSums * size;
  float* const sums = fits ? shared + threadIdx.y * kSums * size : of_block;
  for (long long i = threadIdx.x; i < kSums * size; i += blockDim.x) sums[i] = 0.0f;

  const float length = static_cast<float>(size);
  for (long long first = static_cast<long long>(blockIdx.x) * blockDim.y; first < rows;
       first += static_cast<long long>(gridDim.x) * blockDim.y) {
    const long long row = first + threadIdx.y, offset = row < rows ? row * size : 0;
    const auto of_row = [&](auto* data) { return data == nullptr ? data : data + offset; };
    const Span<T> span =
        span_of(row < rows ? size : 0, x + offset, dout + offset, of_row(more), of_row(dx), of_row(dother));
    const Rows<T, 2, 2> in(span, {x + offset, dout + offset});
    const auto scaled = [&](const auto& elements, auto count) {
      constexpr int n = decltype(count)::value;
      Floats<n> values = elements.row[1];
      if constexpr (kWeight) {
        const Floats<n> scale = load_any<n>(weight + elements.first);
#pragma unroll
        for (int e = 0; e < n; ++e) values.at[e] *= scale.at[e];
      }
      return values;
    };

    float means[3] = {0.0f, 0.0f, 0.0f};  // of x, g and x * kShrink
    if constexpr (kCenter) {
      in.for_each([&](const auto& elements, auto count) {
        const auto g = scaled(elements, count);
#pragma unroll
        for (int e = 0; e < decltype(count)::value; ++e) {
          means[0] += elements.row[0].at[e];
          means[1] += g.at[e];
          means[2] += elements.row[0].at[e] * kShrink;
        }
      });
      sum_row(means);
#pragma unroll
      for (float& mean : means) mean /= length;
    }
    float products[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // of x with x and g, and of x * kShrink
    in.for_each([&](const auto& elements, auto count) {
      const auto g = scaled(elements, count);
#pragma unroll
      for (int e = 0; e < decltype(count)::value; ++e) {
        const float centered = elements.row[0].at[e] - means[0];
        products[0] += centered * centered;
        products[1] += centered * g.at[e];
        const float shrunk = elements.row[0].at[e] * kShrink - means[2];
        products[2] += shrunk * shrunk;
        products[3] += shrunk * g.at[e];
      }
    });
    sum_row(products);
    const Scaling scaling = scaling_of(means[0], means[2], products[0], products[2], length, eps);
    const float slope = (scaling.factor == 1.0f ? products[1] : products[3]) * scaling.inverse / length;
    const float inverse = scaling.inverse * scaling.factor;

    in.for_each([&](const auto& elements, auto count) {
      constexpr int n = decltype(count)::value;
      const auto g = scaled(elements, count);
      Floats<n> values, with_weight;
#pragma unroll
      for (int e = 0; e < n; ++e) {
        const float y = (elements.row[0].at[e] * scaling.factor - scaling.mean) * scaling.inverse;
        values.at[e] = inverse * (g.at[e] - means[1] - y * slope);
        with_weight.at[e] = elements.row[1].at[e] * y;
      }
      if (more != nullptr) {
        const Floats<n> added = load<n>(more + offset + elements.first);
#pragma unroll
        for (int e = 0; e < n; ++e) values.at[e] += added.at[e];
      }
      if (dx != nullptr) store(dx + offset + elements.first, values);
      if (dother != nullptr) store(dother + offset + elements.first, values);
      // Rows that are aligned differently give an element to different threads: sum_row has ordered them.
      if constexpr (kWeightSum) add_any(sums + elements.first, with_weight);
      if constexpr (kBiasSum) add_any(sums + int{kWeightSum} * size + elements.first, elements.row[1]);
    });
  }
  if (kSums == 0 || !fits) return;
  __syncthreads();
  const long long threads = blockDim.x * blockDim.y;
  for (long long i = threadIdx.y * blockDim.x + threadIdx.x; i < kSums * size; i += threads) {
    float sum = 0.0f;
    for (unsigned y = 0; y < blockDim.y; ++y) sum += shared[y * kSums * size + i];
    of_block[i] = sum;
  }
}

// Backward: two launches with the same parameters, of this and of normalize_backward_sum, the second one only if there
// are sums. A gradient that is not needed is null: dx, or dweight without kWeightSum, or dbias without kBiasSum. `bias`
// and `out` are not read.
//
// With g = dout * weight and y = (x - mean) * inverse: dx = inverse * (g - mean(g) - y * mean(g * y)), where RMS norm
// has no means of x and g; dweight = sum(dout * y), dbias = sum(dout).
//
// The workspace `parts`: f32 [num_parts, sums, size], where num_parts is the grid, and sums the number of dweight and
// dbias that are needed. Shared bytes: block.y * sums * size * 4 if the device has them for a block, else 0.
template <typename T, bool kCenter, bool kWeight, bool kWeightSum, bool kBiasSum>
__global__ void __launch_bounds__(768, 1)
    normalize_backward(const T* x, const float* weight, const float* bias, const T* out, const T* dout, T* dx,
                       float* dweight, float* dbias, float* parts, long long rows, long long size, long long num_parts,
                       long long shared_bytes, float eps) {
  constexpr const T* kNone = nullptr;
  constexpr T* kNowhere = nullptr;
  backward_of_rows<kCenter, kWeight, kWeightSum, kBiasSum>(x, weight, dout, kNone, dx, kNowhere, parts, rows, size,
                                                           shared_bytes, eps);
}

// The second launch of backward: dweight and dbias, where they are needed. Block (32, 8), grid ceil(size / 32), no
// shared bytes.
template <typename T>
__global__ void __launch_bounds__(256)
    normalize_backward_sum(const T* x, const float* weight, const float* bias, const T* out, const T* dout, T* dx,
                           float* dweight, float* dbias, float* parts, long long rows, long long size,
                           long long num_parts, long long shared_bytes, float eps) {
  const long long stride = (dweight != nullptr && dbias != nullptr ? 2 : 1) * size;
  if (dweight != nullptr) sum_parts(parts, dweight, stride, size, num_parts);
  if (dbias != nullptr) sum_parts(parts + stride - size, dbias, stride, size, num_parts);
}

// The same two launches for the norm of a sum, by its `total`: dx and dresidual are the gradient of the norm and
// dtotal, added up. x, residual and `out` are not read.
template <typename T, bool kWeight, bool kWeightSum>
__global__ void __launch_bounds__(768, 1)
    add_normalize_backward(const T* x, const T* residual, const float* weight, const T* out, const T* total,
                           const T* dout, const T* dtotal, T* dx, T* dresidual, float* dweight, float* parts,
                           long long rows, long long size, long long num_parts, long long shared_bytes, float eps) {
  backward_of_rows<false, kWeight, kWeightSum, false>(total, weight, dout, dtotal, dx, dresidual, parts, rows, size,
                                                      shared_bytes, eps);
}

template <typename T>
__global__ void __launch_bounds__(256)
    add_normalize_backward_sum(const T* x, const T* residual, const float* weight, const T* out, const T* total,
                               const T* dout, const T* dtotal, T* dx, T* dresidual, float* dweight, float* parts,
                               long long rows, long long size, long long num_parts, long long shared_bytes, float eps) {
  sum_parts(parts, dweight, size, size, num_parts);
}

}  // namespace eqxcallback
