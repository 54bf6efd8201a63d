// Group norm (https://arxiv.org/abs/1803.08494), forward and backward: layer norm of each group of neighbouring
// channels, whose elements lie after each other, with parameters for each channel.
//
// x, out [rows, channels, size] of T, where rows = batch * groups, and a group has so many channels; weight, bias
// [groups * channels] f32, each null if there is none; sums are f32. Nothing is kept for backward: the statistics of a
// row are computed again. What of a row does not stay in registers is read again, from cache.
//
// The geometry of all kernels but the last, where packs = ceil(channels * size * sizeof(T) / 16): threads = clamp(32 *
// ceil(packs / 128), 32, 512), block (threads, max(1, 128 / threads)), grid ceil(rows / block.y), no shared bytes. Any
// other number of threads of a row, a multiple of 32, is right.
#include "norm.cuh"

namespace eqxcallback {

// The channel of an element of a row, and those of the elements after it.
class Channel {
 public:
  __device__ Channel(long long element, long long size)
      : size_(size), index_(divide(element, size)), left_(size - (element - index_ * size)) {}
  __device__ long long next() {
    const long long index = index_;
    if (--left_ == 0) {
      ++index_;
      left_ = size_;
    }
    return index;
  }

 private:
  long long size_, index_, left_;
};

// The row of a thread: a group of an example. Threads of no row take part in the sums.
struct Group {
  bool exists;
  long long length, offset, first_channel;

  __device__ Group(long long rows, long long groups, long long channels, long long size) {
    const long long row = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
    exists = row < rows;
    length = exists ? channels * size : 0;
    offset = row * length;
    first_channel = exists ? (row - divide(row, groups) * groups) * channels : 0;
  }
};

template <typename T, bool kWeight, bool kBias>
__global__ void __launch_bounds__(512, 1)
    group_norm(const T* x, const float* weight, const float* bias, T* out, long long rows, long long groups,
               long long channels, long long size, float eps) {
  const Group group(rows, groups, channels, size);
  x += group.offset;
  out += group.offset;
  if constexpr (kWeight) weight += group.first_channel;
  if constexpr (kBias) bias += group.first_channel;
  const Rows<T, 1, 4> in(span_of(group.length, x, out), {x});
  const Scaling scaling = scaling_of_row<true>(in, channels * size, eps);
  in.for_each([&](const auto& elements, auto count) {
    constexpr int n = decltype(count)::value;
    Floats<n> values = elements.row[0];
    Channel channel(elements.first, size);
#pragma unroll
    for (int e = 0; e < n; ++e) {
      values.at[e] = (values.at[e] * scaling.factor - scaling.mean) * scaling.inverse;
      if constexpr (kWeight || kBias) {
        const long long c = channel.next();
        if constexpr (kWeight) values.at[e] *= weight[c];
        if constexpr (kBias) values.at[e] += bias[c];
      }
    }
    store(out + elements.first, values);
  });
}

// The sums over a channel of dout, and of dout * y.
struct ChannelSums {
  float dout, product;
};

// of(channel, ChannelSums) for each channel of a row, by one thread, where y = (x * factor - mean) * inverse. Each
// channel has a warp, or several where there are more of them. All threads of the block call it.
template <typename T, typename Of>
__device__ inline void sum_channels(const T* x, const T* dout, bool exists, long long channels, long long size,
                                    const Scaling& scaling, Of of) {
  __shared__ float of_warps[2][32];
  const long long warps = blockDim.x / 32, share = channels < warps ? divide(warps, max(channels, 1ll)) : 1;
  const long long warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const long long threads = share * 32, own = warp % share * 32 + lane;
  const auto sums_of = [&](long long c) {
    const T* const from = x + c * size;
    const T* const upstream = dout + c * size;
    const Span<T> span = span_of(size, from, upstream);
    ChannelSums sums = {0.0f, 0.0f};
    const auto add = [&](const auto& values, const auto& d) {
#pragma unroll
      for (int e = 0; e < d.kCount; ++e) {
        sums.dout += d.at[e];
        sums.product += d.at[e] * ((values.at[e] * scaling.factor - scaling.mean) * scaling.inverse);
      }
    };
    for (long long i = own; i < span.packs; i += threads) {
      add(load<kPack<T>>(from + span.pack(i)), load<kPack<T>>(upstream + span.pack(i)));
    }
    for (long long i = own; i < span.edges; i += threads) {
      add(load<1>(from + span.edge(i)), load<1>(upstream + span.edge(i)));
    }
    return ChannelSums{reduce_warp<Add>(sums.dout), reduce_warp<Add>(sums.product)};
  };
  if (share == 1) {
    for (long long c = warp; c < (exists ? channels : 0); c += warps) {
      const ChannelSums sums = sums_of(c);
      if (lane == 0) of(c, sums);
    }
    return;
  }
  const long long c = divide(warp, share), at = threadIdx.y * warps + warp;
  if (exists && c < channels) {
    const ChannelSums sums = sums_of(c);
    if (lane == 0) {
      of_warps[0][at] = sums.dout;
      of_warps[1][at] = sums.product;
    }
  }
  __syncthreads();
  if (!exists || c >= channels || own != 0) return;
  ChannelSums sums = {0.0f, 0.0f};
  for (long long i = at; i < at + share; ++i) {
    sums.dout += of_warps[0][i];
    sums.product += of_warps[1][i];
  }
  of(c, sums);
}

// Backward: two launches with the same parameters, of this and of group_norm_backward_sum, the second one only if
// dweight or dbias is needed. A gradient that is not needed is null. `bias` and `out` are not read.
//
// With g = dout * weight and y = (x - mean) * inverse: dx = inverse * (g - mean(g) - y * mean(g * y)); dweight =
// sum(dout * y), dbias = sum(dout). The sums over a channel serve both.
//
// The workspace `parts`: f32 [sums, batch, groups * channels], the sums of each example, first those of dweight and
// then those of dbias, where they are needed.
template <typename T, bool kWeight>
__global__ void __launch_bounds__(640, 1)
    group_norm_backward(const T* x, const float* weight, const float* bias, const T* out, const T* dout, T* dx,
                        float* dweight, float* dbias, float* parts, long long rows, long long groups,
                        long long channels, long long size, float eps) {
  const Group group(rows, groups, channels, size);
  x += group.offset;
  dout += group.offset;
  if constexpr (kWeight) weight += group.first_channel;
  const Span<T> span = span_of(group.length, x, dout, dx == nullptr ? dx : dx + group.offset);
  const Rows<T, 1, 2> in(span, {x});
  const Scaling scaling = scaling_of_row<true>(in, channels * size, eps);

  const long long row = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
  float* const of_weight = dweight == nullptr ? nullptr : parts + row * channels;
  float* const of_bias = dbias == nullptr ? nullptr : parts + ((dweight == nullptr ? 0 : rows) + row) * channels;
  float means[2] = {0.0f, 0.0f};  // of g, and of g * y
  sum_channels(x, dout, group.exists, channels, size, scaling, [&](long long c, const ChannelSums& sums) {
    if (of_weight != nullptr) of_weight[c] = sums.product;
    if (of_bias != nullptr) of_bias[c] = sums.dout;
    const float factor = kWeight ? weight[c] : 1.0f;
    means[0] += factor * sums.dout;
    means[1] += factor * sums.product;
  });
  if (dx == nullptr) return;
  sum_row(means);
  const float length = static_cast<float>(channels * size);
  means[0] /= length;
  means[1] /= length;
  const float inverse = scaling.inverse * scaling.factor;
  in.for_each([&](const auto& elements, auto count) {
    constexpr int n = decltype(count)::value;
    Floats<n> values = elements.row[0];
    const Floats<n> upstream = load<n>(dout + elements.first);
    Channel channel(elements.first, size);
#pragma unroll
    for (int e = 0; e < n; ++e) {
      const float y = (values.at[e] * scaling.factor - scaling.mean) * scaling.inverse;
      const float g = kWeight ? upstream.at[e] * weight[channel.next()] : upstream.at[e];
      values.at[e] = inverse * (g - means[0] - y * means[1]);
    }
    store(dx + group.offset + elements.first, values);
  });
}

// dweight and dbias, where they are needed. Block (32, 8), grid ceil(groups * channels / 32), no shared bytes.
template <typename T>
__global__ void __launch_bounds__(256)
    group_norm_backward_sum(const T* x, const float* weight, const float* bias, const T* out, const T* dout, T* dx,
                            float* dweight, float* dbias, float* parts, long long rows, long long groups,
                            long long channels, long long size, float eps) {
  const long long all = groups * channels, batch = divide(rows, groups);
  if (dweight != nullptr) sum_parts(parts, dweight, all, all, batch);
  if (dbias != nullptr) sum_parts(parts + (dweight == nullptr ? 0 : batch * all), dbias, all, all, batch);
}

}  // namespace eqxcallback
