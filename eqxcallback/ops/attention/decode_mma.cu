// The attention of one token over a cache, as decode.cuh describes it, by tensor cores: keys and values are read once
// for up to 16 query heads of a key/value head, which are the 16 rows of products m16n8k16.
//
// T is bf16 or f16; C is T, or int8 with T = bf16, which has these integers exactly. Sums are f32. Weights are rounded
// to T before the second product, those of int8 after they are multiplied by v_scale; the sum of them is not.
//
// Each warp has tiles of 16 keys of its own, and a ring of four in shared memory: keys, values, keys, values. While it
// computes one, three are on their way. So warps wait for each other only at the end, when their softmaxes are joined.
//
// Where the keys are one part, this launch writes `out`, and there is no second one.
#include "decode.cuh"

namespace eqxcallback {

constexpr int kHeads = 16, kTileKeys = 16, kRing = 4;

// Which rows and columns of products the lanes have, and what of the cache they are: in int8, the two bytes that are
// next to each other in a word would have to be apart. But which column is which is free as long as both sides agree.
template <typename C, int kSize>
struct Tile {
  static constexpr bool kInt8 = sizeof(C) == 1;
  // Three blocks and more have enough shared memory, and registers if the compiler is told.
  static constexpr int kWarps = kSize > 128 ? 2 : 4, kBlocks = kSize > 64 ? 3 : 4;
  static constexpr int kChunks = kSize * static_cast<int>(sizeof(C)) / 16;
  // An odd number of chunks apart, 8 rows of a chunk are in different banks.
  static constexpr int kStride = (kChunks | 1) * 16;
  static constexpr int kBytes = kTileKeys * (kStride + (kInt8 ? 4 : 0));  // with the scales of keys

  // Of the queries: the first of two columns next to each other, of 16 from 16 * step on.
  __device__ static int query_column(int step, int half, int quarter) {
    return 16 * step + (kInt8 ? 4 * quarter + 2 * half : 8 * half + 2 * quarter);
  }
  // Of the results: column `column` of 8 of a product.
  __device__ static int value_column(int product, int column) {
    return kInt8 ? product / 2 * 16 + 2 * column + product % 2 : 8 * product + column;
  }
};

//   block     32 * warps, which are 4, and 2 for size above 128
//   grid      batch * kv_heads * chunks * parts, where chunks = ceil(heads / kv_heads / 16)
//   shared    warps * max(4 * kBytes, 64 * (size + 2)) + 32 * size bytes: the rings, then a softmax of each warp; and
//             the queries as lanes want them, for which there are no registers
//   parts     as for decode_attention
//   kSize     size, a multiple of 16 up to 256
//   kMore     whether there are slopes or a soft cap
template <typename T, typename C, int kSize, bool kMore>
__global__ void __launch_bounds__(32 * Tile<C, kSize>::kWarps, Tile<C, kSize>::kBlocks)
    decode_attention_mma(const T* __restrict__ q, const C* __restrict__ k, const C* __restrict__ v,
                         const int* __restrict__ length, const float* alibi_slopes, const float* k_scale,
                         const float* v_scale, T* __restrict__ out, float* __restrict__ highest,
                         float* __restrict__ sums, float* __restrict__ sums_out, long long batch, long long kv_batch,
                         long long length_batch, long long keys, long long heads, long long kv_heads, long long size,
                         long long parts, long long slopes_every, long long slopes_batch, long long window, float scale,
                         float soft_cap) {
  using L = Tile<C, kSize>;
  constexpr int kRowBytes = kSize * static_cast<int>(sizeof(C));
  constexpr int kWarps = L::kWarps, kSteps = kSize / 16, kProducts = kSize / 8, kSoftmax = kHeads * (kSize + 2);
  constexpr int kOfWarp = kRing * L::kBytes > kSoftmax * 4 ? kRing * L::kBytes : kSoftmax * 4;
  DYN_SHARED(unsigned char, shared);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int row = lane / 4, quarter = lane % 4;  // rows are query heads: `row` and row + 8
  unsigned char* const of_warp = shared + warp * kOfWarp;

  const long long group = divide(heads, kv_heads), chunks = (group + kHeads - 1) / kHeads;
  const Share own = share_of_block(chunks, parts, kv_heads);
  const Seen seen = seen_keys(length, own.b, length_batch, keys, window);
  const long long filled = seen.first + seen.count, part_keys = keys_in_part(seen.count, parts);
  const long long begin = seen.first + own.part * part_keys, end = min(begin + part_keys, filled);
  if (begin >= end && parts > 1) return;

  // Tile i of this warp has `left_of(i)` keys from first_key + i * kWarps * 16 on; tiles are in the ring two after two.
  const long long first_key = begin + warp * kTileKeys, left_of_all = end - first_key;
  const int tiles = static_cast<int>((max(left_of_all, 0ll) + kWarps * kTileKeys - 1) / (kWarps * kTileKeys));
  const auto left_of = [&](int i) {
    return static_cast<int>(min(left_of_all - static_cast<long long>(i) * (kWarps * kTileKeys), 16ll));
  };
  const auto place_of = [&](int i, int which) { return of_warp + (i % 2 * 2 + which) * L::kBytes; };
  const long long first_row = (own.b - divide(own.b, kv_batch) * kv_batch) * keys + first_key;
  const unsigned row_bytes = static_cast<unsigned>(kv_heads) * kRowBytes;  // of a key, which has no 4 GiB
  const auto fetch = [&](int i, int which, const C* from, const float* scales) {
    if (i < tiles) {
      unsigned char* const to = place_of(i, which);
      const long long at = (first_row + static_cast<long long>(i) * (kWarps * kTileKeys)) * kv_heads + own.kv_head;
      const int left = left_of(i);
      const unsigned char* const first = reinterpret_cast<const unsigned char*>(from) + at * kRowBytes;
#pragma unroll
      for (int j = lane; j < kTileKeys * L::kChunks; j += 32) {
        const int key = j / L::kChunks, chunk = j % L::kChunks;
        const unsigned long long offset =
            static_cast<unsigned long long>(row_bytes) * static_cast<unsigned>(min(key, left - 1));
        begin_copy<16>(to + key * L::kStride + chunk * 16, first + offset + chunk * 16, key < left);
      }
      if (L::kInt8 && lane < kTileKeys) {
        begin_copy<4>(to + kTileKeys * L::kStride + lane * 4, scales + at + min(lane, left - 1) * kv_heads,
                      lane < left);
      }
    }
    end_group();
  };
  for (int i = 0; i < 2; ++i) {
    fetch(i, 0, k, k_scale);
    fetch(i, 1, v, v_scale);
  }

  // Heads beyond the last one are zeros: computed, and dropped.
  const long long first_head = own.kv_head * group + own.chunk * kHeads;
  const int num_heads = static_cast<int>(min(group - own.chunk * kHeads, static_cast<long long>(kHeads)));
  uint4* const queries = reinterpret_cast<uint4*>(shared + kWarps * kOfWarp) + lane;  // [steps, lanes]
  for (int step = warp; step < kSteps; step += kWarps) {
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int head = row + i % 2 * 8;
      const T* const from = q + (own.b * heads + first_head + head) * kSize + L::query_column(step, i / 2, quarter);
      words[i] = head < num_heads ? *reinterpret_cast<const unsigned*>(from) : 0;
    }
    queries[32 * step] = make_uint4(words[0], words[1], words[2], words[3]);
  }
  __syncthreads();
  const auto multiply = [&](float (&sums)[4], int step, unsigned low, unsigned high) {
    const uint4 rows = queries[32 * step];
    mma(sums, {rows.x, rows.y, rows.z, rows.w}, {low, high}, T());
  };
  const float* slopes = alibi_slopes;
  if (kMore && slopes != nullptr) slopes += slopes_of(own.b, slopes_every, slopes_batch, heads) + first_head;

  // Where the rows of four matrices are that a lane says: of keys a chunk and the next, then 8 keys on; of values the
  // other way round. Of an odd number of chunks, what follows the last one is loaded too, and dropped.
  const int of_low = lane / 8 % 2, of_high = lane / 16;
  const int row_of_keys = (lane % 8 + 8 * of_high) * L::kStride + 16 * of_low;
  const int row_of_values = (lane % 8 + 8 * of_low) * L::kStride + 16 * of_high;

  float most_of[2] = {kLowest, kLowest}, total_of[2] = {}, results[kProducts][4] = {};
  for (int i = 0; i < tiles; ++i) {
    wait_for_groups<3>();
    __syncwarp();
    // scores[n][e]: head row + e / 2 * 8, key 8 n + 2 quarter + e % 2.
    const unsigned char* tile = place_of(i, 0);
    float scores[2][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; step += L::kInt8 ? 2 : 1) {
      unsigned words[4];
      if constexpr (L::kInt8) {
        load_matrices<false>(words, tile + row_of_values + 16 * step);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (step + j / 2 == kSteps) continue;
          const unsigned turned = words[j] ^ kTurnSigns;
          multiply(scores[j % 2], step + j / 2, bf16_of_bytes<0, 1>(turned), bf16_of_bytes<2, 3>(turned));
        }
      } else {
        load_matrices<false>(words, tile + row_of_keys + 32 * step);
#pragma unroll
        for (int n = 0; n < 2; ++n) multiply(scores[n], step, words[2 * n], words[2 * n + 1]);
      }
    }
    const int left = left_of(i);
    const long long behind = filled - 1 - first_key - static_cast<long long>(i) * (kWarps * kTileKeys);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int j = 8 * n + 2 * quarter + e % 2;
        float& score = scores[n][e];
        score *= scale * kLog2E;
        if constexpr (L::kInt8) score *= reinterpret_cast<const float*>(tile + kTileKeys * L::kStride)[j];
        if constexpr (kMore) {
          score = capped(score, soft_cap);
          if (slopes != nullptr) {
            score -= slopes[min(row + e / 2 * 8, num_heads - 1)] * kLog2E * static_cast<float>(behind - j);
          }
        }
        if (j >= left) score = 2 * kLowest;  // -inf, whose weight is 0
      }
    }
    __syncwarp();  // these keys have been used
    fetch(i + 2, 0, k, k_scale);

#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = most_of[r];
#pragma unroll
      for (int j = 0; j < 4; ++j) most = fmaxf(most, scores[j / 2][2 * r + j % 2]);
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2));
      if (most > most_of[r]) {  // rarely, but for the first keys
        const float factor = exp2f(most_of[r] - most);
        most_of[r] = most;
        total_of[r] *= factor;
#pragma unroll
        for (int p = 0; p < kProducts; ++p) results[p][2 * r] *= factor, results[p][2 * r + 1] *= factor;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& score = scores[j / 2][2 * r + j % 2];
        score = exp2f(score - most);
        total_of[r] += score;
      }
    }

    wait_for_groups<3>();
    __syncwarp();
    tile = place_of(i, 1);
    if constexpr (L::kInt8) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          scores[n][e] *= reinterpret_cast<const float*>(tile + kTileKeys * L::kStride)[8 * n + 2 * quarter + e % 2];
        }
      }
    }
    // The scores are where the next product wants its rows.
    unsigned weights[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) weights[j] = pack_pair(scores[j / 2][j % 2 * 2], scores[j / 2][j % 2 * 2 + 1], T());
#pragma unroll
    for (int chunk = 0; chunk < L::kChunks; chunk += 2) {
      unsigned words[4];
      load_matrices<true>(words, tile + row_of_values + 16 * chunk);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (chunk + c == L::kChunks) continue;
        const unsigned low = words[2 * c], high = words[2 * c + 1];
        if constexpr (L::kInt8) {
          const unsigned of_low = low ^ kTurnSigns, of_high = high ^ kTurnSigns;
          mma(results[2 * (chunk + c)], weights, {bf16_of_bytes<0, 2>(of_low), bf16_of_bytes<0, 2>(of_high)}, T());
          mma(results[2 * (chunk + c) + 1], weights, {bf16_of_bytes<1, 3>(of_low), bf16_of_bytes<1, 3>(of_high)}, T());
        } else {
          mma(results[chunk + c], weights, {low, high}, T());
        }
      }
    }
    __syncwarp();
    fetch(i + 2, 1, v, v_scale);
  }

  // All blocks run by now, or have nothing to do: the blocks of the second launch take no place of theirs.
  let_next_launch_begin();

  // The rings have been used up, and the softmax of each warp takes its place: [heads, (highest, sum, columns)].
  __syncwarp();
  float* const softmax = reinterpret_cast<float*>(of_warp);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    total_of[r] += __shfl_xor_sync(kAllLanes, total_of[r], 1);
    total_of[r] += __shfl_xor_sync(kAllLanes, total_of[r], 2);
    float* const of_head = softmax + (row + 8 * r) * (kSize + 2);
    if (quarter == 0) of_head[0] = most_of[r], of_head[1] = total_of[r];
#pragma unroll
    for (int p = 0; p < kProducts; ++p) {
#pragma unroll
      for (int e = 0; e < 2; ++e) of_head[2 + L::value_column(p, 2 * quarter + e)] = results[p][2 * r + e];
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < num_heads * kSize; i += 32 * kWarps) {
    const int head = i / kSize, column = i % kSize;
    float most = kLowest, total = 0.0f, sum = 0.0f;
    const auto of_head = [&](int w) {
      return reinterpret_cast<const float*>(shared + w * kOfWarp) + head * (kSize + 2);
    };
    for (int w = 0; w < kWarps; ++w) most = fmaxf(most, of_head(w)[0]);
    for (int w = 0; w < kWarps; ++w) {
      const float factor = exp2f(of_head(w)[0] - most);
      total += of_head(w)[1] * factor;
      sum += of_head(w)[2 + column] * factor;
    }
    const long long at = own.b * heads + first_head + head, place = at * parts + own.part;
    if (parts == 1) {
      out[at * kSize + column] = from_float<T>(total == 0.0f ? 0.0f : sum / total);
      continue;
    }
    sums_out[place * kSize + column] = sum;
    if (column == 0) highest[place] = most, sums[place] = total;
  }
}

}  // namespace eqxcallback
