// RMS norm (https://arxiv.org/abs/1910.07467) and layer norm (https://arxiv.org/abs/1607.06450), forward and backward.
//
// x, out [rows, size] of T; weight, bias [size] f32, each null if there is none; sums are f32. Nothing is kept for
// backward: the statistics of a row are computed again, from what has to be read anyway. A row is read once: its first
// kPacks packs of each thread stay in registers, what is beyond is read again, from cache.
//
// The geometry of all kernels, where packs = ceil(size * sizeof(T) / 16):
//   forward   threads = clamp(32 * ceil(packs / 128), 32, 512), block (threads, max(1, 128 / threads)),
//             grid ceil(rows / block.y)
//   backward  threads = clamp(32 * ceil(packs / 64), 32, 512), block (threads, max(1, 256 / threads)), grid
//             parts = max(1, min(ceil(rows / block.y), multiprocessors * max(1, floor(768 / (threads * block.y))))):
//             what is resident at a time
// Any other number of threads of a row, a multiple of 32, is right, and any number of parts.
#include "../common.cuh"

namespace eqxcallback {

// Of one row of each of kRows arrays: the same elements of all.
template <int kRows, int n>
struct Elements {
  long long first;
  Floats<n> row[kRows];
};

template <typename T, int kRows, int kPacks>
class Rows {
 public:
  __device__ Rows(const Span<T>& span, const T* const (&data)[kRows]) : span_(span) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) data_[r] = data[r];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const long long i = threadIdx.x + p * static_cast<long long>(blockDim.x);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (i < span.packs) kept_[p][r] = *reinterpret_cast<const uint4*>(data_[r] + span.pack(i));
      }
    }
  }

  // body(Elements, Count) for the share of this thread.
  template <typename Body>
  __device__ void for_each(Body body) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const long long i = threadIdx.x + p * static_cast<long long>(blockDim.x);
      if (i >= span_.packs) continue;
      Elements<kRows, kPack<T>> elements;
      elements.first = span_.pack(i);
#pragma unroll
      for (int r = 0; r < kRows; ++r) elements.row[r] = unpack<T>(kept_[p][r]);
      body(elements, Count<kPack<T>>());
    }
    for (long long i = threadIdx.x + kPacks * static_cast<long long>(blockDim.x); i < span_.packs; i += blockDim.x) {
      body(read<kPack<T>>(span_.pack(i)), Count<kPack<T>>());
    }
    for (long long i = threadIdx.x; i < span_.edges; i += blockDim.x) body(read<1>(span_.edge(i)), Count<1>());
  }

 private:
  template <int n>
  __device__ Elements<kRows, n> read(long long first) const {
    Elements<kRows, n> elements;
    elements.first = first;
#pragma unroll
    for (int r = 0; r < kRows; ++r) elements.row[r] = load<n>(data_[r] + first);
    return elements;
  }

  Span<T> span_;
  const T* data_[kRows];
  uint4 kept_[kPacks][kRows];
};

// Squares overflow from 2^64 on. So every sum over a row is made twice, of its elements and of these times a power of
// two, by which the squares of all rows that overflow are normal numbers.
constexpr float kShrink = 0x1p-96f;

// A row is normalized to y = (x * factor - mean) * inverse.
struct Scaling {
  float factor, mean, inverse;
};
// `squares` are the sums of both, and `means` those of the elements.
__device__ inline Scaling scaling_of(float mean, float shrunk_mean, float squares, float shrunk_squares, float length,
                                     float eps) {
  if (squares <= -kLowest) return {1.0f, mean, rsqrtf(squares / length + eps)};
  constexpr float kSmallest = 0x1p-126f;  // in place of eps, which is nothing beside them: for rows of one value
  return {kShrink, shrunk_mean, rsqrtf(shrunk_squares / length + kSmallest)};
}

// Forward. kCenter: layer norm, else RMS norm. Without kWeight, `weight` is null, and likewise for the bias. No shared
// bytes.
template <typename T, bool kCenter, bool kWeight, bool kBias>
__global__ void __launch_bounds__(512, 1)
    normalize(const T* x, const float* weight, const float* bias, T* out, long long rows, long long size, float eps) {
  const long long row = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool exists = row < rows;  // threads of no row take part in the sums
  x += exists ? row * size : 0;
  out += exists ? row * size : 0;
  const Span<T> span(exists ? size : 0, x, out);
  const Rows<T, 1, 4> in(span, {x});

  const float length = static_cast<float>(size);
  float means[2] = {0.0f, 0.0f};
  if constexpr (kCenter) {
    in.for_each([&](const auto& elements, auto count) {
      for (const float value : elements.row[0].at) {
        means[0] += value;
        means[1] += value * kShrink;
      }
    });
    sum_row(means);
    means[0] /= length;
    means[1] /= length;
  }
  float squares[2] = {0.0f, 0.0f};
  in.for_each([&](const auto& elements, auto count) {
    for (const float value : elements.row[0].at) {
      const float centered = value - means[0], shrunk = value * kShrink - means[1];
      squares[0] += centered * centered;
      squares[1] += shrunk * shrunk;
    }
  });
  sum_row(squares);
  const Scaling scaling = scaling_of(means[0], means[1], squares[0], squares[1], length, eps);

  in.for_each([&](const auto& elements, auto count) {
    constexpr int n = decltype(count)::value;
    Floats<n> values = elements.row[0], scale, shift;
    if constexpr (kWeight) scale = load_any<n>(weight + elements.first);
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

// The sums over rows of dweight and dbias: those of a block in shared memory while there is room, which is then
// [block.y, sums, size] f32, and else where they end up, in parts [grid, sums, size], for which block.y is 1.
constexpr long long kSharedBytes = 96 << 10;

// Backward: two launches with the same parameters, of this and of normalize_backward_sum, the second one only if there
// are sums. A gradient that is not needed is null: dx, or dweight without kWeightSum, or dbias without kBiasSum. `bias`
// and `out` are not read.
//
// With g = dout * weight and y = (x - mean) * inverse: dx = inverse * (g - mean(g) - y * mean(g * y)), where RMS norm
// has no means of x and g; dweight = sum(dout * y), dbias = sum(dout).
//
// The workspace `parts`: f32 [num_parts, sums, size], where num_parts is the grid, and sums the number of dweight and
// dbias that are needed. Shared bytes: block.y * sums * size * 4 if that is at most 96 KiB, else 0.
template <typename T, bool kCenter, bool kWeight, bool kWeightSum, bool kBiasSum>
__global__ void __launch_bounds__(768, 1)
    normalize_backward(const T* x, const float* weight, const float* bias, const T* out, const T* dout, T* dx,
                       float* dweight, float* dbias, float* parts, long long rows, long long size, long long num_parts,
                       float eps) {
  constexpr int kSums = int{kWeightSum} + int{kBiasSum};
  DYN_SHARED(float, shared);
  const bool fits = blockDim.y * kSums * size * 4 <= kSharedBytes;
  float* const of_block = parts + blockIdx.x * kSums * size;
  float* const sums = fits ? shared + threadIdx.y * kSums * size : of_block;
  for (long long i = threadIdx.x; i < kSums * size; i += blockDim.x) sums[i] = 0.0f;

  const float length = static_cast<float>(size);
  for (long long first = static_cast<long long>(blockIdx.x) * blockDim.y; first < rows;
       first += static_cast<long long>(gridDim.x) * blockDim.y) {
    const long long row = first + threadIdx.y, offset = row < rows ? row * size : 0;
    Span<T> span(row < rows ? size : 0, x + offset, dout + offset);
    const Span<T> both(row < rows ? size : 0, x + offset, dx + offset);
    if (dx != nullptr && both.packs < span.packs) span = both;
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
      if (dx != nullptr) store(dx + offset + elements.first, values);
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

// result[i] = the sum over all parts of parts[i]. Of a block (32, 8), 32 elements.
__device__ inline void sum_parts(const float* parts, float* result, long long stride, long long size, long long count) {
  __shared__ float sums[8][32];
  const long long i = static_cast<long long>(blockIdx.x) * 32 + threadIdx.x;
  float sum = 0.0f;
  if (i < size) {
#pragma unroll 4
    for (long long part = threadIdx.y; part < count; part += 8) sum += parts[part * stride + i];
  }
  __syncthreads();  // this is called twice
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && i < size) {
    for (int y = 1; y < 8; ++y) sum += sums[y][threadIdx.x];
    result[i] = sum;
  }
}

// The second launch of backward: dweight and dbias, where they are needed. Block (32, 8), grid ceil(size / 32), no
// shared bytes.
template <typename T>
__global__ void __launch_bounds__(256)
    normalize_backward_sum(const T* x, const float* weight, const float* bias, const T* out, const T* dout, T* dx,
                           float* dweight, float* dbias, float* parts, long long rows, long long size,
                           long long num_parts, float eps) {
  const long long stride = (dweight != nullptr && dbias != nullptr ? 2 : 1) * size;
  if (dweight != nullptr) sum_parts(parts, dweight, stride, size, num_parts);
  if (dbias != nullptr) sum_parts(parts + stride - size, dbias, stride, size, num_parts);
}

}  // namespace eqxcallback
