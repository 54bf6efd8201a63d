// Linear layers over GGUF blocks, x @ weights^T, for some rows of 16-bit types, by tensor cores.
//
// x [rows, in_features] and out [rows, out_features] of T; blocks [out_features, bytes], as quantized.cu has them.
// in_features is a multiple of 128: so many are a part, whole packs of 8 or 16 bytes. Addresses are multiples of 16, as
// XLA's are.
//
// Digits are exact in both types, so nothing of a weight is rounded: products of digits and x are added up in f32 for
// each 32 features, and multiplied by their scale; a minimum is multiplied by the sum of the x, which is one more
// product, with ones.
//
// Weights are the 16 rows of a product (m16n8k16), rows of x its 8 columns. Which of the 32 features is which of the
// two times 16 is free as long as both sides agree.
#include "../ptx.cuh"
#include "quantized_codes.cuh"

namespace eqxcallback {

// Two numbers of a word less two of another.
template <typename Pair>
__device__ inline unsigned subtract(unsigned word, unsigned other) {
  Pair values, offsets;
  memcpy(static_cast<void*>(&values), &word, sizeof(word));
  memcpy(static_cast<void*>(&offsets), &other, sizeof(other));
  values = __hsub2(values, offsets);
  memcpy(&word, static_cast<const void*>(&values), sizeof(word));
  return word;
}

// Bytes 0 and 2 of a word as two numbers of T. Those of digits, whose mask says how many bits they have, are cheaper
// with an offset, or in another unit.
template <typename T>
struct Integers;
template <>
struct Integers<__nv_bfloat16> {
  // The last bits of a number that ends in its unit, 128 + q.
  static constexpr float kUnit = 1.0f, kOffset = 128.0f;
  __device__ static unsigned of_digits(unsigned word, unsigned mask) { return and_or(word, mask, 0x43004300u); }
  // 128 and the low seven bits, less 128 or, if the sign bit is set, 256.
  __device__ static unsigned of_int8(unsigned word) {
    return subtract<__nv_bfloat162>(of_digits(word, 0x007f007fu), of_digits(word, 0x00800080u));
  }
};
template <>
struct Integers<__half> {
  // The last bits of a number without an exponent.
  static constexpr float kUnit = 1.0f / 16777216.0f, kOffset = 0.0f;
  __device__ static unsigned of_digits(unsigned word, unsigned mask) { return word & mask; }
  // 1024 + 128 and the byte, less these.
  __device__ static unsigned of_int8(unsigned word) {
    constexpr unsigned kOffsets = 0x64806480u;
    return subtract<__half2>((word & 0x00ff00ffu) ^ kOffsets, kOffsets);
  }
};

// A quarter of 32 weights, which a lane has: eight digits in pairs, the first and third of four and the second and
// fourth, then those of the other four. A weight is scale * digit + minimum.
struct Digits {
  unsigned pairs[4];
  float scale, minimum;

  // Of digits of Integers<T>.
  template <typename T>
  __device__ void set(float of_digit, float least) {
    scale = of_digit / Integers<T>::kUnit;
    minimum = least - Integers<T>::kOffset * of_digit;
  }
};

// A part of a row, 128 features: kPacks packs of kPack bytes, which are copied at once. `from` says where in a row of
// weights they are; those from the fifth on follow each other, and two parts on each is 2 * kRowBytes further. In
// shared memory rows are kStride apart, for other banks, and `read` takes one there, and which 32 features. `features`
// takes those of x, whose packs may be in another order. A multiprocessor has the registers of so many `blocks` of 4
// warps, if with few rows of x kUnrolled steps are under way.
template <Encoding encoding>
struct Packed;

template <>
struct Packed<Q4_1> {
  static constexpr int kPacks = 5, kPack = 16, kStride = 112, kUnrolled = 4;
  static constexpr long long kRowBytes = 80;
  static constexpr bool kHasMinimum = true;

  static constexpr int blocks(int row_tiles) { return row_tiles == 8 ? 2 : row_tiles == 4 ? 3 : 4; }
  __device__ static long long from(int part, int pack) { return part * kRowBytes + pack * kPack; }
  template <typename T>
  __device__ static Digits read(const unsigned char* row, int, int step, int quarter) {
    const unsigned* const words = reinterpret_cast<const unsigned*>(row + 20 * step);
    const unsigned both = words[0], digits = words[1 + quarter];
    Digits result;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      result.pairs[i] = Integers<T>::of_digits(digits >> (i / 2 * 4 + i % 2 * 8), 0x000f000fu);
    }
    result.set<T>(half_of(static_cast<unsigned short>(both)), half_of(static_cast<unsigned short>(both >> 16)));
    return result;
  }
  // Low halves of bytes are features 4 * quarter .. + 3, high ones are 16 + 4 * quarter .. + 3.
  __device__ static uint4 features(const void* x, int step, int quarter, int swizzle) {
    const int pack = 4 * step + quarter / 2, half = quarter % 2;
    const uint2* const of_row = static_cast<const uint2*>(x);
    const uint2 low = of_row[2 * (pack ^ swizzle) + half], high = of_row[2 * ((pack + 2) ^ swizzle) + half];
    return make_uint4(low.x, low.y, high.x, high.y);
  }
};

// 8 * quarter .. + 7.
__device__ inline uint4 features_in_order(const void* x, int step, int quarter, int swizzle) {
  return static_cast<const uint4*>(x)[(4 * step + quarter) ^ swizzle];
}

template <>
struct Packed<Q8_0> {
  static constexpr int kPacks = 17, kPack = 8, kStride = 144, kUnrolled = 4;
  static constexpr long long kRowBytes = 136;
  static constexpr bool kHasMinimum = false;

  static constexpr int blocks(int row_tiles) { return Packed<Q4_1>::blocks(row_tiles); }
  __device__ static long long from(int part, int pack) { return part * kRowBytes + pack * kPack; }
  template <typename T>
  __device__ static Digits read(const unsigned char* row, int, int step, int quarter) {
    const unsigned char* const block = row + 34 * step;
    const uint2 both = eight_at(block + 2 + 8 * quarter);
    Digits result;
#pragma unroll
    for (int i = 0; i < 4; ++i) result.pairs[i] = Integers<T>::of_int8((i < 2 ? both.x : both.y) >> i % 2 * 8);
    result.scale = half_at(block);
    result.minimum = 0.0f;
    return result;
  }
  __device__ static uint4 features(const void* x, int step, int quarter, int swizzle) {
    return features_in_order(x, step, quarter, swizzle);
  }
};

// A part is half of a block of 256 weights: the packs before its digits, kHead, and a half of these.
template <int kBlockBytes, int kHead>
struct Packed256 {
  static constexpr int kPacks = kHead + 4, kPack = 16, kUnrolled = 2;
  static constexpr long long kRowBytes = kBlockBytes / 2;
  static constexpr bool kHasMinimum = true;

  static constexpr int blocks(int row_tiles) { return row_tiles == 4 ? 2 : row_tiles == 2 ? 3 : 4; }
  __device__ static long long from(int part, int pack) {
    return part / 2 * (2 * kRowBytes) + pack * kPack + (pack < kHead ? 0 : part % 2 * 64);
  }
  __device__ static uint4 features(const void* x, int step, int quarter, int swizzle) {
    return features_in_order(x, step, quarter, swizzle);
  }
};

template <>
struct Packed<Q4_K> : Packed256<144, 1> {
  static constexpr int kStride = 96;

  template <typename T>
  __device__ static Digits read(const unsigned char* row, int part, int step, int quarter) {
    const uint2 digits = *reinterpret_cast<const uint2*>(row + 16 + step / 2 * 32 + 8 * quarter);
    const int by = 4 * (step % 2);
    Digits result;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      result.pairs[i] = Integers<T>::of_digits((i < 2 ? digits.x : digits.y) >> (by + i % 2 * 8), 0x000f000fu);
    }
    const Scales of(row, part % 2 * 4 + step);
    result.set<T>(of.scale, of.minimum);
    return result;
  }
};

template <>
struct Packed<Q5_K> : Packed256<176, 3> {
  static constexpr int kStride = 160;

  template <typename T>
  __device__ static Digits read(const unsigned char* row, int part, int step, int quarter) {
    const uint2 bits = *reinterpret_cast<const uint2*>(row + 16 + 8 * quarter);
    const uint2 digits = *reinterpret_cast<const uint2*>(row + 48 + step / 2 * 32 + 8 * quarter);
    const int by = 4 * (step % 2), eighth = part % 2 * 4 + step;
    Digits result;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned low = (i < 2 ? digits.x : digits.y) >> (by + i % 2 * 8) & 0x000f000fu;
      const unsigned fifth = (i < 2 ? bits.x : bits.y) >> (eighth + i % 2 * 8) & 0x00010001u;
      result.pairs[i] = Integers<T>::of_digits(low | fifth << 4, 0x001f001fu);
    }
    const Scales of(row, eighth);
    result.set<T>(of.scale, of.minimum);
    return result;
  }
};

// Eight features, two times four, in the order of the digits.
__device__ inline uint4 in_pairs(uint4 x) {
  return make_uint4(__byte_perm(x.x, x.y, 0x5410u), __byte_perm(x.x, x.y, 0x7632u), __byte_perm(x.z, x.w, 0x5410u),
                    __byte_perm(x.z, x.w, 0x7632u));
}

// The packs of 16 bytes of a row of x are in another order in shared memory, for other banks.
__device__ inline int swizzle_of(int row) { return row % 2 * 4 + (row & 2); }

// A block has 32 rows of weights, for kRowTiles times 8 rows of x. Each of its kWarps takes every so many parts of the
// features, by itself, and has two of them in shared memory: while it computes one, the other is on its way. Few rows
// of x are in shared memory as well. Of many, which there is no room for, the next step's are in registers.
//
// kGated: blocks has 2 * out_features rows, those of the gate first, and out is silu(gate) * up. Both are rounded to T
// before, as quantized_linear and glu.cu do one after the other. A block has 16 rows of the gate and the 16 of up.
//
// Block 32 * kWarps, of which there are 4 or 8. Grid (ceil(out_features / 32), or 16 if gated, ceil(rows / (8 *
// kRowTiles))). Shared bytes kWarps * max(2 * (32 * kStride + 256 * n), 1024 * kRowTiles), where n is min(rows, 8 *
// kRowTiles), or 0 if x is not in shared memory. kRowTiles 1 or 2, with x there, or 4 or 8, which is too many for
// blocks of 256 weights.
template <typename T, Encoding encoding, int kRowTiles, int kWarps, bool kGated = false>
__global__ void __launch_bounds__(32 * kWarps, 4 * Packed<encoding>::blocks(kRowTiles) / kWarps)
    quantized_linear_mma(const T* __restrict__ x, const unsigned char* __restrict__ blocks, T* __restrict__ out,
                         long long rows, long long in_features, long long out_features) {
  using P = Packed<encoding>;
  constexpr int kWeights = 32, kTiles = kWeights / 16, kRows = 8 * kRowTiles, kFeatures = 128, kSteps = kFeatures / 32;
  constexpr int kResults = kGated ? kWeights / 2 : kWeights, kWeightBytes = kWeights * P::kStride;
  constexpr bool kStaged = kRowTiles <= 2;  // x is in shared memory
  DYN_SHARED(unsigned char, shared);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int column = lane / 4, quarter = lane % 4;
  const long long output = static_cast<long long>(blockIdx.x) * kResults;
  const long long row = static_cast<long long>(blockIdx.y) * kRows;
  const int parts = static_cast<int>(in_features / kFeatures);
  const long long row_bytes = parts * P::kRowBytes;
  const int rows_here = static_cast<int>(min(rows - row, static_cast<long long>(kRows)));
  const int part_bytes =
      kWeightBytes + (kStaged ? static_cast<int>(min(rows, static_cast<long long>(kRows))) * 256 : 0);
  const int warp_bytes = max(2 * part_bytes, kRows * kWeights * 4);
  unsigned char* const of_warp = shared + warp * warp_bytes;

  // What this lane copies of the next part. A power of two of packs is of as many lanes, which have a few rows at once;
  // of the other packs a lane has a row. Weights beyond the end are zeros.
  constexpr int kAcross = P::kPacks >= 16 ? 16 : 4, kAtOnce = 32 / kAcross;
  const int own_row = lane / kAcross, own_pack = lane % kAcross, own_x = lane / 16, own_x_pack = lane % 16;
  const int count = static_cast<int>(min(out_features - output, static_cast<long long>(kResults)));
  const long long to_up = kGated ? (out_features - kResults) * row_bytes : 0;  // for the rows after those of the gate
  const long long rows_on = kAtOnce * row_bytes, x_rows_on = 2 * in_features;
  const unsigned char* next = blocks + output * row_bytes;
  const unsigned char* next_last = next + lane * row_bytes + (lane < kResults ? 0 : to_up) + P::from(warp, kAcross);
  next += own_row * row_bytes + P::from(warp, own_pack);
  const T* next_x = x + (row + own_x) * in_features + warp * kFeatures + own_x_pack * 8;
  const int to_row = own_row * P::kStride + own_pack * P::kPack, to_last = lane * P::kStride + kAcross * P::kPack;
  const int to_x[2] = {kWeightBytes + own_x * 256 + (own_x_pack ^ swizzle_of(own_x)) * 16,
                       kWeightBytes + own_x * 256 + (own_x_pack ^ swizzle_of(own_x + 2)) * 16};
  const auto fetch = [&](bool is_there, int place) {
    if (is_there) {
      unsigned char* const to = of_warp + place * part_bytes;
      const unsigned char* from = next;
#pragma unroll
      for (int i = 0; i < kWeights; i += kAtOnce) {
        if (kGated && i == kResults) from += to_up;
        begin_copy<P::kPack>(to + to_row + i * P::kStride, from, i % kResults + own_row < count);
        from += rows_on;
      }
#pragma unroll
      for (int pack = 0; pack < P::kPacks - kAcross; ++pack) {
        begin_copy<P::kPack>(to + to_last + pack * P::kPack, next_last + pack * P::kPack, lane % kResults < count);
      }
      next += kWarps * P::kRowBytes;
      next_last += kWarps * P::kRowBytes;
      if constexpr (kStaged) {
        const T* from_x = next_x;
#pragma unroll
        for (int r = 0; r < kRows; r += 2) {
          if (r + own_x < rows_here) begin_copy<16>(to + to_x[r / 2 % 2] + r * 256, from_x, true);
          from_x += x_rows_on;
        }
        next_x += kWarps * kFeatures;
      }
    }
    end_group();
  };
  fetch(warp < parts, 0);

  // Rows of x beyond the end are the last one: computed, and dropped.
  int of_rows[kRowTiles], swizzles[kRowTiles];
  unsigned offsets[kRowTiles];  // rows have no 4 Gi elements
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
    const int own = min(8 * r + column, rows_here - 1);
    of_rows[r] = kWeightBytes + own * 256;
    swizzles[r] = swizzle_of(own);
    offsets[r] = static_cast<unsigned>(row + own) * static_cast<unsigned>(in_features);
  }
  uint4 ahead[kRowTiles];
  const auto load_x = [&](int part, int step, int r) {
    // Of the part after the last one, what is there instead is loaded, and dropped.
    const unsigned at = static_cast<unsigned>(min(part, parts - 1) * kFeatures + step * 32);
    return P::features(x + (offsets[r] + at), 0, quarter, 0);
  };
  if (!kStaged && warp < parts) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) ahead[r] = load_x(warp, 0, r);
  }

  float sums[kTiles][kRowTiles][4] = {};
  int place = 0;
  for (int part = warp; part < parts; part += kWarps) {
    wait_for_groups<0>();
    __syncwarp();  // this part is there, and the one before has been used, whose place is the next one's
    fetch(part + kWarps < parts, 1 - place);
    const unsigned char* const staged = of_warp + place * part_bytes;
    place = 1 - place;
    constexpr int kUnrolled = kRowTiles == 1 ? P::kUnrolled : kRowTiles == 2 ? 2 : 1;
#pragma unroll kUnrolled
    for (int step = 0; step < kSteps; ++step) {
      Digits digits[kTiles][2];
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        digits[i / 2][i % 2] = P::template read<T>(staged + (8 * i + column) * P::kStride, part, step, quarter);
      }
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        uint4 bits;
        if constexpr (kStaged) {
          bits = in_pairs(P::features(staged + of_rows[r], step, quarter, swizzles[r]));
        } else {
          bits = in_pairs(ahead[r]);
          const int later = step + 1;
          ahead[r] = load_x(later < kSteps ? part : part + kWarps, later % kSteps, r);
        }
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
  float* const own_sums = reinterpret_cast<float*>(of_warp);  // [rows, weights]
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        own_sums[(8 * r + 2 * quarter + e % 2) * kWeights + 16 * tile + e / 2 * 8 + column] = sums[tile][r][e];
      }
    }
  }
  __syncthreads();
  const auto result = [&](int i) {
    float sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) sum += reinterpret_cast<const float*>(shared + w * warp_bytes)[i];
    return from_float<T>(sum);
  };
  for (int i = static_cast<int>(threadIdx.x); i < rows_here * kResults; i += 32 * kWarps) {
    const int r = i / kResults, o = i % kResults, at = r * kWeights + o;
    if (o >= count) continue;
    T& to = out[(row + r) * out_features + output + o];
    if constexpr (kGated) {
      to = from_float<T>(swish<T>(to_float(result(at))) * to_float(result(at + kResults)));
    } else {
      to = result(at);
    }
  }
}

}  // namespace eqxcallback
