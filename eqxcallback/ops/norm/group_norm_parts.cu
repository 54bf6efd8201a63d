// Group norm of large groups, each of which several blocks share. See group_norm.cu for the operands.
//
// A row has `parts` parts, one for a block: `part_channels` whole channels, or, of larger ones, a piece of one channel,
// of `piece` elements. The last part of a row and the last piece of a channel may be smaller. A launch leaves the
// moments of each part, and the next ones join those of a row, in each block: that is less to read than the part.
//
// The geometry of all kernels but the last: block 256, grid rows * parts, no shared bytes. What of a part does not stay
// in registers is read again, from cache. The workspace `moments`: f32 [rows, parts, 4].
#include "group_norm.cuh"

namespace eqxcallback {

struct Division {
  long long channels, size, parts, part_channels, piece;

  __device__ long long pieces() const { return divide(size + piece - 1, piece); }
};

struct Part {
  long long row, first_channel, channels, piece, size;  // `size` elements of each channel
  long long offset;                                     // of its first element in x

  __device__ Part(const Division& of, long long row, long long index) : row(row) {
    const long long pieces = of.pieces(), share = divide(index, pieces);
    first_channel = share * of.part_channels;
    channels = min(of.part_channels, of.channels - first_channel);
    piece = index - share * pieces;
    size = min(of.piece, of.size - piece * of.piece);
    offset = (row * of.channels + first_channel) * of.size + piece * of.piece;
  }
  __device__ long long length() const { return channels * size; }
};

__device__ inline Part part_of_block(const Division& of) {
  const long long row = divide(blockIdx.x, of.parts);
  return Part(of, row, blockIdx.x - row * of.parts);
}

// The moments of the part of this block.
template <typename T>
__device__ inline void store_moments(const T* x, float* moments, const Division& division) {
  const Part part = part_of_block(division);
  const T* const from = x + part.offset;
  const Rows<T, 1, 4> in(span_of(part.length(), from), {from});
  const Moments own = moments_of_row<true>(in, static_cast<float>(part.length()));
  if (threadIdx.x != 0) return;
  store_any(moments + 4ll * blockIdx.x, Floats<4>{own.means[0], own.means[1], own.squares[0], own.squares[1]});
}

// Of the row of a block: the squares around its mean are those around the mean of each part, and of what is between.
__device__ inline Scaling scaling_of_parts(const float* moments, const Division& division, long long row, float eps) {
  moments += 4 * row * division.parts;
  const auto for_each_part = [&](auto body) {
    for (long long i = threadIdx.x; i < division.parts; i += blockDim.x) {
      body(load_any<4>(moments + 4 * i).at, static_cast<float>(Part(division, row, i).length()));
    }
  };
  const float length = static_cast<float>(division.channels * division.size);
  Moments all = {{0.0f, 0.0f}, {0.0f, 0.0f}};
  for_each_part([&](const float (&part)[4], float elements) {
#pragma unroll
    for (int i = 0; i < 2; ++i) all.means[i] += part[i] * (elements / length);
  });
  sum_row(all.means);
  for_each_part([&](const float (&part)[4], float elements) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float apart = part[i] - all.means[i];
      all.squares[i] += part[2 + i] + elements * (apart * apart);
    }
  });
  sum_row(all.squares);
  return scaling_of(all, length, eps);
}

// Forward: two launches with the same parameters.
template <typename T>
__global__ void __launch_bounds__(256, 3)
    group_norm_moments(const T* x, const float* weight, const float* bias, T* out, float* moments, long long groups,
                       long long channels, long long size, long long parts, long long part_channels, long long piece,
                       float eps) {
  store_moments(x, moments, {channels, size, parts, part_channels, piece});
}

template <typename T, bool kWeight, bool kBias>
__global__ void __launch_bounds__(256, 2)
    group_norm_of_parts(const T* x, const float* weight, const float* bias, T* out, float* moments, long long groups,
                        long long channels, long long size, long long parts, long long part_channels, long long piece,
                        float eps) {
  const Division division = {channels, size, parts, part_channels, piece};
  const Part part = part_of_block(division);
  x += part.offset;
  out += part.offset;
  const long long channel = (part.row - divide(part.row, groups) * groups) * channels + part.first_channel;
  if constexpr (kWeight) weight += channel;
  if constexpr (kBias) bias += channel;
  const Rows<T, 1, 4> in(span_of(part.length(), x, out), {x});
  const Scaling scaling = scaling_of_parts(moments, division, part.row, eps);
  scale_channels<T, kWeight, kBias>(in, scaling, weight, bias, out, part.size);
}

// Backward: four launches with the same parameters, of group_norm_backward_moments, _sums, _of_parts if dx is needed,
// and _parts_sum if dweight or dbias is. A gradient that is not needed is null. `bias` and `out` are not read.
//
// The workspace `means`: f32 [rows, parts, 2], the share of a part in mean(g) and mean(g * y). The workspace `sums`:
// f32 [wanted, batch, pieces, groups * channels], first those of dweight and then those of dbias, where they are
// needed.
template <typename T>
__global__ void __launch_bounds__(256, 3)
    group_norm_backward_moments(const T* x, const float* weight, const float* bias, const T* out, const T* dout, T* dx,
                                float* dweight, float* dbias, float* moments, float* means, float* sums,
                                long long batch, long long groups, long long channels, long long size, long long parts,
                                long long part_channels, long long piece, float eps) {
  store_moments(x, moments, {channels, size, parts, part_channels, piece});
}

template <typename T, bool kWeight>
__global__ void __launch_bounds__(256, 3)
    group_norm_backward_sums(const T* x, const float* weight, const float* bias, const T* out, const T* dout, T* dx,
                             float* dweight, float* dbias, float* moments, float* means, float* sums, long long batch,
                             long long groups, long long channels, long long size, long long parts,
                             long long part_channels, long long piece, float eps) {
  const Division division = {channels, size, parts, part_channels, piece};
  const Part part = part_of_block(division);
  const Scaling scaling = scaling_of_parts(moments, division, part.row, eps);

  const long long example = divide(part.row, groups), pieces = division.pieces(), all = groups * channels;
  const long long channel = (part.row - example * groups) * channels + part.first_channel;
  float* const of_weight = dweight == nullptr ? nullptr : sums + (example * pieces + part.piece) * all + channel;
  sums += dweight == nullptr ? 0 : batch * pieces * all;
  float* const of_bias = dbias == nullptr ? nullptr : sums + (example * pieces + part.piece) * all + channel;
  float shares[2] = {0.0f, 0.0f};
  sum_channels(x + part.offset, dout + part.offset, true, part.channels, part.size, scaling,
               [&](long long c, const ChannelSums& own) {
                 if (of_weight != nullptr) of_weight[c] = own.product;
                 if (of_bias != nullptr) of_bias[c] = own.dout;
                 const float factor = kWeight ? weight[channel + c] : 1.0f;
                 shares[0] += factor * own.dout;
                 shares[1] += factor * own.product;
               });
  if (dx == nullptr) return;
  sum_row(shares);
  const float length = static_cast<float>(channels * size);
  if (threadIdx.x != 0) return;
  means[2ll * blockIdx.x] = shares[0] / length;
  means[2ll * blockIdx.x + 1] = shares[1] / length;
}

template <typename T, bool kWeight>
__global__ void __launch_bounds__(256, 2)
    group_norm_backward_of_parts(const T* x, const float* weight, const float* bias, const T* out, const T* dout, T* dx,
                                 float* dweight, float* dbias, float* moments, float* means, float* sums,
                                 long long batch, long long groups, long long channels, long long size, long long parts,
                                 long long part_channels, long long piece, float eps) {
  const Division division = {channels, size, parts, part_channels, piece};
  const Part part = part_of_block(division);
  x += part.offset;
  dout += part.offset;
  dx += part.offset;
  if constexpr (kWeight) {
    weight += (part.row - divide(part.row, groups) * groups) * channels + part.first_channel;
  }
  const Rows<T, 2, 4> in(span_of(part.length(), x, dout, dx), {x, dout});
  const Scaling scaling = scaling_of_parts(moments, division, part.row, eps);
  float of_row[2] = {0.0f, 0.0f};
  for (long long i = part.row * parts + threadIdx.x; i < (part.row + 1) * parts; i += blockDim.x) {
    of_row[0] += means[2 * i];
    of_row[1] += means[2 * i + 1];
  }
  sum_row(of_row);
  in.for_each([&](const auto& elements, auto count) {
    const Channel channel(elements.first, part.size);
    store(dx + elements.first,
          gradient_of<kWeight>(elements.row[0], elements.row[1], channel, weight, scaling, of_row));
  });
}

// Block (32, 8), grid ceil(groups * channels / 32), no shared bytes.
template <typename T>
__global__ void __launch_bounds__(256)
    group_norm_backward_parts_sum(const T* x, const float* weight, const float* bias, const T* out, const T* dout,
                                  T* dx, float* dweight, float* dbias, float* moments, float* means, float* sums,
                                  long long batch, long long groups, long long channels, long long size,
                                  long long parts, long long part_channels, long long piece, float eps) {
  const Division division = {channels, size, parts, part_channels, piece};
  const long long all = groups * channels, count = batch * division.pieces();
  if (dweight != nullptr) sum_parts(sums, dweight, all, all, count);
  if (dbias != nullptr) sum_parts(sums + (dweight == nullptr ? 0 : count * all), dbias, all, all, count);
}

}  // namespace eqxcallback
