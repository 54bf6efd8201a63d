// Linear layers over GGUF blocks, x @ weights^T, for some rows of 16-bit types, by tensor cores.
//
// x [rows, in_features] and out [rows, out_features] of T; blocks [out_features, bytes], as quantized.cu has them.
// in_features is a multiple of 256: 8 blocks are whole packs of 16 bytes, and so is what precedes them. Addresses are
// multiples of 16, as XLA's are.
//
// Digits are exact in both types, so nothing of a weight is rounded: products of digits and x are added up in f32 for
// each block of 32, and multiplied by its scale; of Q4_1, the minimum is multiplied by the sum of the x, which is one
// more product, with ones.
//
// Weights are the 16 rows of a product (m16n8k16), rows of x its 8 columns. Which of the 32 features is which of the
// two times 16 is free as long as both sides agree: lane t of four has features 8 t .. 8 t + 7, 16 bytes of x.
#include "../ptx.cuh"
#include "quantized.cuh"

namespace eqxcallback {

// Two elements of T.
__device__ inline unsigned subtract(unsigned pair, float offset, __nv_bfloat16) {
  __nv_bfloat162 values;
  memcpy(static_cast<void*>(&values), &pair, sizeof(pair));
  values = __hsub2(values, __float2bfloat162_rn(offset));
  memcpy(&pair, static_cast<const void*>(&values), sizeof(pair));
  return pair;
}
__device__ inline unsigned subtract(unsigned pair, float offset, __half) {
  __half2 values;
  memcpy(static_cast<void*>(&values), &pair, sizeof(pair));
  values = __hsub2(values, __float2half2_rn(offset));
  memcpy(&pair, static_cast<const void*>(&values), sizeof(pair));
  return pair;
}

// Numbers from 0 on, a byte each, as the last bits of a number of T that ends in their unit. Its first byte, and what
// it is without them.
template <typename T>
struct Integers;
template <>
struct Integers<__nv_bfloat16> {  // up to 127
  static constexpr unsigned kFirst = 0x43434343u;
  static constexpr float kOffset = 128.0f;
};
template <>
struct Integers<__half> {  // up to 1023
  static constexpr unsigned kFirst = 0x64646464u;
  static constexpr float kOffset = 1024.0f;
};

template <typename T>
__device__ inline void from_bytes(unsigned bytes, float offset, unsigned& low, unsigned& high) {
  low = subtract(__byte_perm(bytes, Integers<T>::kFirst, 0x4140u), Integers<T>::kOffset + offset, T());
  high = subtract(__byte_perm(bytes, Integers<T>::kFirst, 0x4342u), Integers<T>::kOffset + offset, T());
}

// A quarter of a block: 8 digits, two to a word, and what they are multiplied by and shifted.
struct Digits {
  unsigned pairs[4];
  float scale, minimum;
};

template <Encoding encoding>
struct Packed;

template <>
struct Packed<Q4_1> {
  static constexpr int kBytes = 20, kStride = 176;  // of 8 blocks of a row in shared memory, in different banks
  static constexpr bool kHasMinimum = true;

  template <typename T>
  __device__ static Digits read(const unsigned char* block, int quarter) {
    const unsigned* const words = reinterpret_cast<const unsigned*>(block + 4 + 8 * (quarter % 2));
    const int shift = quarter / 2 * 4;
    Digits result;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      from_bytes<T>(words[i] >> shift & 0x0f0f0f0fu, 0.0f, result.pairs[2 * i], result.pairs[2 * i + 1]);
    }
    result.scale = half_at(block);
    result.minimum = half_at(block + 2);
    return result;
  }
};

template <>
struct Packed<Q8_0> {
  static constexpr int kBytes = 34, kStride = 272;
  static constexpr bool kHasMinimum = false;

  template <typename T>
  __device__ static Digits read(const unsigned char* block, int quarter) {
    // 8 bytes at an even address: two words from the aligned address before it on, and the last two bytes.
    const unsigned char* from = block + 2 + 8 * quarter;
    const unsigned odd = reinterpret_cast<unsigned long long>(from) & 2;
    const unsigned* words = reinterpret_cast<const unsigned*>(from - odd);
    const unsigned a = words[0], b = words[1], c = *reinterpret_cast<const unsigned short*>(from + 6);
    const unsigned both[2] = {(odd ? __byte_perm(a, b, 0x5432u) : a) ^ kTurnSigns,
                              (odd ? __byte_perm(b, c, 0x5432u) : b) ^ kTurnSigns};
    Digits result;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (Integers<T>::kOffset > 256.0f) {
        from_bytes<T>(both[i], 128.0f, result.pairs[2 * i], result.pairs[2 * i + 1]);
      } else {
        result.pairs[2 * i] = bf16_of_bytes<0, 1>(both[i]);
        result.pairs[2 * i + 1] = bf16_of_bytes<2, 3>(both[i]);
      }
    }
    result.scale = half_at(block);
    result.minimum = 0.0f;
    return result;
  }
};

// A block has 32 outputs, for kRowTiles times 8 rows. Each of its 4 warps takes every fourth part of 256 features: it
// keeps the weights of the next one in registers, on their way, and those of this one in shared memory of its own.
//
// Block 128. Grid (ceil(out_features / 32), ceil(rows / (8 * kRowTiles))). No dynamic shared bytes. kRowTiles 1, 2 or
// 4: there are no registers for more.
template <typename T, Encoding encoding, int kRowTiles>
__global__ void __launch_bounds__(128, kRowTiles == 1 && encoding == Q4_1 ? 3 : 2)
    quantized_linear_mma(const T* __restrict__ x, const unsigned char* __restrict__ blocks, T* __restrict__ out,
                         long long rows, long long in_features, long long out_features) {
  using P = Packed<encoding>;
  constexpr int kWarps = 4, kOutputs = 32, kTiles = kOutputs / 16, kRows = 8 * kRowTiles;
  constexpr int kPacks = 8 * P::kBytes / 16;  // of a row of weights in a part; a lane has as many
  constexpr int kStaged = kOutputs * P::kStride / 16, kSums = kOutputs * kRows / 4;
  constexpr int kShared = kStaged > kSums ? kStaged : kSums;
  __shared__ uint4 shared[kWarps][kShared];
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int group = lane / 4, quarter = lane % 4;
  const long long output = static_cast<long long>(blockIdx.x) * kOutputs;
  const long long row = static_cast<long long>(blockIdx.y) * kRows;
  const long long row_bytes = in_features / 32 * P::kBytes, parts = in_features / 256;

  // Those beyond the end are the last one: computed, and dropped.
  const unsigned char* const first = blocks + output * row_bytes;
  const int last = static_cast<int>(min(out_features - 1 - output, static_cast<long long>(kOutputs - 1)));
  unsigned offsets[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int i = lane + 32 * p;
    offsets[p] = static_cast<unsigned>(min(i / kPacks, last) * row_bytes) + static_cast<unsigned>(i % kPacks * 16);
  }
  const T* of_rows[kRowTiles];
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
    of_rows[r] = x + min(row + 8 * r + group, rows - 1) * in_features + 8 * quarter;
  }

  float sums[kTiles][kRowTiles][4] = {};
  uint4 next[kPacks];
  const auto fetch = [&](long long part) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      next[p] = *reinterpret_cast<const uint4*>(first + part * (16 * kPacks) + offsets[p]);
    }
  };
  if (warp < parts) fetch(warp);
  for (long long part = warp; part < parts; part += kWarps) {
    __syncwarp();  // the weights before have been used
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int i = lane + 32 * p;
      shared[warp][i / kPacks * (P::kStride / 16) + i % kPacks] = next[p];
    }
    __syncwarp();
    if (part + kWarps < parts) fetch(part + kWarps);
    const unsigned char* const staged = reinterpret_cast<const unsigned char*>(shared[warp]);
#pragma unroll 2
    for (int block = 0; block < 8; ++block) {
      Digits digits[kTiles][2];
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        digits[i / 2][i % 2] = P::template read<T>(staged + (8 * i + group) * P::kStride + block * P::kBytes, quarter);
      }
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        const uint4 bits = *reinterpret_cast<const uint4*>(of_rows[r] + part * 256 + block * 32);
        const unsigned b[2][2] = {{bits.x, bits.y}, {bits.z, bits.w}};
        float totals[4] = {};
        if constexpr (P::kHasMinimum) {
          const unsigned one = pack_pair(1.0f, 1.0f, T());
          const unsigned ones[4] = {one, one, one, one};
#pragma unroll
          for (int half = 0; half < 2; ++half) mma(totals, ones, b[half], T());
        }
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const Digits &upper = digits[tile][0], &lower = digits[tile][1];
          float products[4] = {};
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const unsigned a[4] = {upper.pairs[2 * half], lower.pairs[2 * half], upper.pairs[2 * half + 1],
                                   lower.pairs[2 * half + 1]};
            mma(products, a, b[half], T());
          }
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const Digits& own = e < 2 ? upper : lower;
            sums[tile][r][e] += own.scale * products[e];
            if constexpr (P::kHasMinimum) sums[tile][r][e] += own.minimum * totals[e];
          }
        }
      }
    }
  }

  __syncwarp();
  float* const of_warp = reinterpret_cast<float*>(shared[warp]);  // [rows, outputs]
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        of_warp[(8 * r + 2 * quarter + e % 2) * kOutputs + 16 * tile + e / 2 * 8 + group] = sums[tile][r][e];
      }
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kOutputs; i += 128) {
    const long long r = row + i / kOutputs, o = output + i % kOutputs;
    if (r >= rows || o >= out_features) continue;
    float sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) sum += reinterpret_cast<const float*>(shared[w])[i];
    out[r * out_features + o] = from_float<T>(sum);
  }
}

}  // namespace eqxcallback
