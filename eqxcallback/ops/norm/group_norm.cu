// Group norm (https://arxiv.org/abs/1803.08494), forward and backward: layer norm of each group of neighbouring
// channels, whose elements lie after each other, with parameters for each channel.
//
// x, out [rows, channels, size] of T, where rows = batch * groups, and a group has so many channels; weight, bias
// [groups * channels] f32, each null if there is none; sums are f32. Nothing is kept for backward: the statistics of a
// row are computed again. What of a row does not stay in registers is read again, from cache: group_norm_parts.cu has
// rows for which that is too much for one block.
//
// The geometry of all kernels but the last, where packs = ceil(channels * size * sizeof(T) / 16): threads = clamp(32 *
// ceil(packs / 128), 32, 512), block (threads, max(1, 128 / threads)), grid ceil(rows / block.y), no shared bytes. Any
// other number of threads of a row, a multiple of 32, is right.
#include "group_norm.cuh"

namespace eqxcallback {

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
  scale_channels<T, kWeight, kBias>(in, scaling, weight, bias, out, size);
}

// Backward: two launches with the same parameters, of this and of group_norm_backward_sum, the second one only if
// dweight or dbias is needed. A gradient that is not needed is null. `bias` and `out` are not read.
//
// dweight = sum(dout * y), dbias = sum(dout). The sums over a channel serve them and dx.
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
  in.for_each([&](const auto& elements, auto count) {
    constexpr int n = decltype(count)::value;
    const Channel channel(elements.first, size);
    const Floats<n> upstream = load<n>(dout + elements.first);
    const Floats<n> values = gradient_of<kWeight>(elements.row[0], upstream, channel, weight, scaling, means);
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
