// Linear layers over GGUF blocks, x @ weights^T, for some rows of 16-bit types, by tensor cores.
//
// x [rows, in_features] and out [rows, out_features] of T; blocks [out_features, bytes], as quantized.cu has them.
// in_features is a multiple of 128: so many are a part, whole packs of 8 or 16 bytes. Addresses are multiples of 16, as
// XLA's are.
//
// Digits are exact in both types, so nothing of a weight is rounded: products of digits and x are added up in f32 for
// each 32 features, or 16, and multiplied by their scale; a minimum is multiplied by the sum of the x, which is one
// more product, with ones.
//
// Weights are the 16 rows of a product (m16n8k16), rows of x its 8 columns. Which of the 32 features is which of the
// two times 16 is free as long as both sides agree.
#include "quantized_packed.cuh"

namespace eqxcallback {

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
  constexpr int kAcross = P::kAcross, kAtOnce = 32 / kAcross;
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
        begin_copy<P::kPack>(to + to_row + i * P::kStride, P::pack_at(from), i % kResults + own_row < count);
        from += rows_on;
      }
#pragma unroll
      for (int pack = 0; pack < P::kPacks - kAcross; ++pack) {
        const unsigned char* const at = next_last + pack * P::kPack;
        const unsigned bytes = lane % kResults < count ? P::bytes(kAcross + pack, at) : 0;
        begin_copy_of<P::kPack>(to + to_last + pack * P::kPack, P::pack_at(at), bytes);
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

  // Where this lane's rows of weights begin, modulo 16: eight rows on it is the same.
  const long long begin = (output + column) * row_bytes;
  const int begins[kTiles] = {static_cast<int>(begin & 15), static_cast<int>((begin + to_up) & 15)};

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
        digits[i / 2][i % 2] = P::template read<T>(
            staged + (8 * i + column) * P::kStride + P::shift(begins[i / 2], part), part, step, quarter);
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
          float products[2][4] = {};
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const unsigned a[4] = {upper.pairs[2 * half], lower.pairs[2 * half], upper.pairs[2 * half + 1],
                                   lower.pairs[2 * half + 1]};
            mma(products[P::kTwoScales ? half : 0], a, b[half], T());
          }
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const Digits& own = e < 2 ? upper : lower;
            sums[tile][r][e] += own.scale * products[0][e];
            if constexpr (P::kTwoScales) sums[tile][r][e] += own.second * products[1][e];
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
