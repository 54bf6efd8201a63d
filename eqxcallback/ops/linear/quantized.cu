// Linear layers over GGUF blocks, x @ weights^T, computed in f32. The weights are decoded in registers.
//
// x [rows, in_features] and out [rows, out_features] of T; blocks [out_features, bytes], the blocks of in_features
// weights one after the other, its address a multiple of 16, as XLA's are. See quantized_codes.cuh for what is in a
// block.
#include "quantized_codes.cuh"

namespace eqxcallback {

template <typename T>
__device__ inline void load_four(const T* from, float (&values)[8], int first) {
  T four[4];
  if constexpr (sizeof(T) == 4) {
    const uint4 bits = *reinterpret_cast<const uint4*>(from);
    memcpy(static_cast<void*>(four), &bits, sizeof(bits));
  } else {
    const uint2 bits = *reinterpret_cast<const uint2*>(from);
    memcpy(static_cast<void*>(four), &bits, sizeof(bits));
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) values[first + i] = to_float(four[i]);
}

// For kRows rows of x, 1, 2, 4 or 8: each weight is read once for all of them, and each x once for kOutputs rows of
// weights.
//
// kGated: blocks has 2 * out_features rows, those of the gate first, and out is silu(gate) * up. Both are rounded to T
// before, as quantized_linear and glu.cu do one after the other.
//
// Block 128. Grid (ceil(out_features / 4), or ceil(out_features / 2) if gated, ceil(rows / kRows)). No shared bytes.
template <typename T, Encoding encoding, int kRows, bool kGated = false>
__global__ void __launch_bounds__(128, kRows > 4 ? 2 : 4)
    quantized_linear(const T* __restrict__ x, const unsigned char* __restrict__ blocks, T* __restrict__ out,
                     long long rows, long long in_features, long long out_features) {
  using C = Code<encoding>;
  constexpr int kOutputs = 4, kWarps = 4, kResults = kGated ? kOutputs / 2 : kOutputs;
  __shared__ float of_warps[kWarps][kRows * kOutputs];
  const long long output = static_cast<long long>(blockIdx.x) * kResults;
  const long long row = static_cast<long long>(blockIdx.y) * kRows;
  const long long row_bytes = in_features / C::kWeights * C::kBytes;

  // Those beyond the end are the last one: computed, and dropped.
  float sums[kRows][kOutputs] = {};
  for (long long i = threadIdx.x; i < in_features / 8; i += 128) {
    const long long part = i / 4;
    const int quarter = static_cast<int>(i % 4);
    float values[kRows][8], totals[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const T* from = x + min(row + r, rows - 1) * in_features + part * 32;
      load_four(from + C::first(quarter), values[r], 0);
      load_four(from + C::second(quarter), values[r], 4);
      totals[r] = 0.0f;
#pragma unroll
      for (int e = 0; e < 8; ++e) totals[r] += values[r][e];
    }
    Quarter quarters[kOutputs];
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) {
      long long weights = min(output + o % kResults, out_features - 1);
      if (o >= kResults) weights += out_features;  // those of up
      quarters[o] = C::read(blocks + weights * row_bytes, part, quarter);
    }
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float product = 0.0f;
#pragma unroll
        for (int e = 0; e < 8; ++e) product += quarters[o].digits[e] * values[r][e];
        sums[r][o] += quarters[o].scale * product;
        if constexpr (C::kHasMinimum) sums[r][o] += C::shift(quarters[o]) * totals[r];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) {
      const float sum = reduce_warp<Add>(sums[r][o]);
      if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32][r * kOutputs + o] = sum;
    }
  }
  __syncthreads();
  const long long r = row + threadIdx.x / kResults, o = output + threadIdx.x % kResults;
  if (threadIdx.x >= kRows * kResults || r >= rows || o >= out_features) return;
  const auto result = [&](unsigned i) {
    float sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) sum += of_warps[w][i];
    return from_float<T>(sum);
  };
  if constexpr (kGated) {
    const unsigned i = threadIdx.x / kResults * kOutputs + threadIdx.x % kResults;
    out[r * out_features + o] = from_float<T>(swish<T>(to_float(result(i))) * to_float(result(i + kResults)));
  } else {
    out[r * out_features + o] = result(threadIdx.x);
  }
}

// For many rows: tiles of 64 rows and 64 outputs, 32 features at a time.
//
// Block 256. Grid (ceil(out_features / 64), ceil(rows / 64)). No shared bytes.
template <typename T, Encoding encoding>
__global__ void __launch_bounds__(256)
    quantized_linear_tiled(const T* __restrict__ x, const unsigned char* __restrict__ blocks, T* __restrict__ out,
                           long long rows, long long in_features, long long out_features) {
  using C = Code<encoding>;
  constexpr int kTile = 64;
  // Padded, so that columns of the tiles lie in different banks, and still aligned.
  __shared__ float of_x[32][kTile + 4];
  __shared__ float of_weights[32][kTile + 4];
  const long long output = static_cast<long long>(blockIdx.x) * kTile;
  const long long row = static_cast<long long>(blockIdx.y) * kTile;
  const long long row_bytes = in_features / C::kWeights * C::kBytes;

  // This thread reads 8 features of one row of x, and as many weights; it sums 4 x 4 products.
  const int line = static_cast<int>(threadIdx.x / 4), quarter = static_cast<int>(threadIdx.x % 4);
  const int top = static_cast<int>(threadIdx.x / 16) * 4, left = static_cast<int>(threadIdx.x % 16) * 4;
  const T* from_x = x + min(row + line, rows - 1) * in_features;
  const unsigned char* from_blocks = blocks + min(output + line, out_features - 1) * row_bytes;

  float sums[4][4] = {};
  for (long long part = 0; part < in_features / 32; ++part) {
    float values[8];
    load_four(from_x + part * 32 + 8 * quarter, values, 0);
    load_four(from_x + part * 32 + 8 * quarter + 4, values, 4);
    const Quarter weights = C::read(from_blocks, part, quarter);
    __syncthreads();  // the tiles before have been used
#pragma unroll
    for (int e = 0; e < 8; ++e) of_x[8 * quarter + e][line] = values[e];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      of_weights[C::first(quarter) + e][line] = C::weight(weights.digits[e], weights);
      of_weights[C::second(quarter) + e][line] = C::weight(weights.digits[4 + e], weights);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const Floats<4> a = load<4>(&of_x[i][top]), b = load<4>(&of_weights[i][left]);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
#pragma unroll
        for (int o = 0; o < 4; ++o) sums[r][o] += a.at[r] * b.at[o];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) {
#pragma unroll
    for (int o = 0; o < 4; ++o) {
      if (row + top + r >= rows || output + left + o >= out_features) continue;
      out[(row + top + r) * out_features + output + left + o] = from_float<T>(sums[r][o]);
    }
  }
}

}  // namespace eqxcallback
