// What group norms share: channels of a row, and their sums.
#ifndef EQXCALLBACK_GROUP_NORM_CUH
#define EQXCALLBACK_GROUP_NORM_CUH

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

// out = (x * factor - mean) * inverse * weight + bias, of channels of `size` elements each.
template <typename T, bool kWeight, bool kBias, typename In>
__device__ inline void scale_channels(const In& in, const Scaling& scaling, const float* weight, const float* bias,
                                      T* out, long long size) {
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

// dx = inverse * (g - mean(g) - y * mean(g * y)) with g = dout * weight and y = (x * factor - mean) * inverse, of
// elements from one of `channel` on. `means` are those of the row.
template <bool kWeight, int n>
__device__ inline Floats<n> gradient_of(Floats<n> x, const Floats<n>& dout, Channel channel, const float* weight,
                                        const Scaling& scaling, const float (&means)[2]) {
  const float inverse = scaling.inverse * scaling.factor;
#pragma unroll
  for (int e = 0; e < n; ++e) {
    const float y = (x.at[e] * scaling.factor - scaling.mean) * scaling.inverse;
    const float g = kWeight ? dout.at[e] * weight[channel.next()] : dout.at[e];
    x.at[e] = inverse * (g - means[0] - y * means[1]);
  }
  return x;
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

}  // namespace eqxcallback

#endif  // EQXCALLBACK_GROUP_NORM_CUH
