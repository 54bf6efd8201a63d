// Linear layers over GGUF blocks, x @ weights^T, computed in f32. The weights are decoded in registers.
//
// x [rows, in_features] and out [rows, out_features] of T; blocks [out_features, bytes] of in_features / 32 blocks of
// 32 weights, its address a multiple of 16, as XLA's are. A Q4_1 block has 20 bytes: f16 d and m, and 16 bytes with
// weight i, d * q + m, in the low half of byte i and weight 16 + i in the high one. A Q8_0 block has 34: f16 d, and 32
// int8 q, of which d * q is a weight.
#include "quantized.cuh"

namespace eqxcallback {

// A quarter of a block: 8 weights, scale * digit + minimum, but for the offset of the digits of Q4_1.
struct Quarter {
  float digits[8], scale, minimum;
};

// `first` and `second` are where in a block the first four weights of a quarter are, and the others.
template <Encoding encoding>
struct Code;

// Bits become numbers under the exponent of 1: a digit is 1 + q / 16, and the scale 16 * d. Who adds up products
// subtracts the 1 from their sum: one operation for 8 weights.
template <>
struct Code<Q4_1> {
  static constexpr long long kBytes = 20;
  static constexpr bool kHasMinimum = true;
  __device__ static int first(int quarter) { return 4 * quarter; }
  __device__ static int second(int quarter) { return 16 + 4 * quarter; }

  __device__ static Quarter read(const unsigned char* block, int quarter) {
    const unsigned digits = *reinterpret_cast<const unsigned*>(block + 4 + 4 * quarter);
    Quarter result;
    const unsigned both = *reinterpret_cast<const unsigned*>(block);
    result.scale = 16.0f * half_of(static_cast<unsigned short>(both));
    result.minimum = half_of(static_cast<unsigned short>(both >> 16));
    const unsigned low = (digits << 3 & 0x78787878u) | 0x80808080u, high = (digits >> 1 & 0x78787878u) | 0x80808080u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned selector = 0x7044u | i << 8;  // the exponent's byte, byte i, two zero bytes
      result.digits[i] = __uint_as_float(__byte_perm(low, 0x3f000000u, selector));
      result.digits[4 + i] = __uint_as_float(__byte_perm(high, 0x3f000000u, selector));
    }
    return result;
  }
  __device__ static float weight(float digit, const Quarter& quarter) {
    return (digit - 1.0f) * quarter.scale + quarter.minimum;
  }
  // What is added for each x, so that the digits need no offset.
  __device__ static float shift(const Quarter& quarter) { return quarter.minimum - quarter.scale; }
};

template <>
struct Code<Q8_0> {
  static constexpr long long kBytes = 34;
  static constexpr bool kHasMinimum = false;
  __device__ static int first(int quarter) { return 8 * quarter; }
  __device__ static int second(int quarter) { return 8 * quarter + 4; }

  __device__ static Quarter read(const unsigned char* block, int quarter) {
    // 8 bytes at an even address: two words from the aligned address before it on, and the last two bytes.
    const unsigned char* from = block + 2 + 8 * quarter;
    const unsigned odd = reinterpret_cast<unsigned long long>(from) & 2;
    const unsigned* words = reinterpret_cast<const unsigned*>(from - odd);
    const unsigned a = words[0], b = words[1], c = *reinterpret_cast<const unsigned short*>(from + 6);
    const unsigned low = odd ? __byte_perm(a, b, 0x5432u) : a, high = odd ? __byte_perm(b, c, 0x5432u) : b;
    Quarter result;
    result.scale = half_at(block);
    result.minimum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // 2^23 + 128 + q: bytes with their sign turned around.
      const unsigned selector = 0x7440u | i;
      result.digits[i] = __uint_as_float(__byte_perm(low ^ 0x80808080u, 0x4b000000u, selector)) - 8388736.0f;
      result.digits[4 + i] = __uint_as_float(__byte_perm(high ^ 0x80808080u, 0x4b000000u, selector)) - 8388736.0f;
    }
    return result;
  }
  __device__ static float weight(float digit, const Quarter& quarter) { return digit * quarter.scale; }
  __device__ static float shift(const Quarter&) { return 0.0f; }
};

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
  const long long row_bytes = in_features / 32 * C::kBytes;

  // Those beyond the end are the last one: computed, and dropped.
  float sums[kRows][kOutputs] = {};
  for (long long i = threadIdx.x; i < in_features / 8; i += 128) {
    const long long block = i / 4;
    const int quarter = static_cast<int>(i % 4);
    float values[kRows][8], totals[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const T* from = x + min(row + r, rows - 1) * in_features + block * 32;
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
      quarters[o] = C::read(blocks + weights * row_bytes + block * C::kBytes, quarter);
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

// For many rows: tiles of 64 rows and 64 outputs, one block of weights at a time.
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
  const long long row_bytes = in_features / 32 * C::kBytes;

  // This thread reads 8 features of one row of x, and a quarter of one block; it sums 4 x 4 products.
  const int line = static_cast<int>(threadIdx.x / 4), quarter = static_cast<int>(threadIdx.x % 4);
  const int top = static_cast<int>(threadIdx.x / 16) * 4, left = static_cast<int>(threadIdx.x % 16) * 4;
  const T* from_x = x + min(row + line, rows - 1) * in_features;
  const unsigned char* from_blocks = blocks + min(output + line, out_features - 1) * row_bytes;

  float sums[4][4] = {};
  for (long long block = 0; block < in_features / 32; ++block) {
    float values[8];
    load_four(from_x + block * 32 + 8 * quarter, values, 0);
    load_four(from_x + block * 32 + 8 * quarter + 4, values, 4);
    const Quarter weights = C::read(from_blocks + block * C::kBytes, quarter);
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
