// The attention of one token over a cache with grouped queries, softmax(scale * q k^T) v, in two launches with the same
// parameters, which decode.cuh describes: blocks take parts of the cache, then their softmaxes are joined.
#include "decode.cuh"

namespace eqxcallback {

// The softmax of some keys for one query head.
template <int n>
struct State {
  float highest = kLowest, sum = 0.0f;
  float out[n] = {};

  // Both as if they had seen the same highest score.
  __device__ void rescale(float next) {
    const float factor = exp2f(highest - next);
    highest = next;
    sum *= factor;
#pragma unroll
    for (int e = 0; e < n; ++e) out[e] *= factor;
  }
};

// How many blocks shall be resident; of 0, the compiler decides.
template <int kColumns, bool kMoreOfF32>
constexpr int kLeastBlocks = kColumns > 8 ? 0
                             : kMoreOfF32 ? 3
                                          : 4;

// A block has kHeads query heads of one key/value head, and one part of its keys; `lanes` threads have a key, each
// kColumns columns of it, and kSteps keys are on their way at a time.
//
//   block     128
//   grid      batch * kv_heads * chunks * parts, where chunks = ceil(heads / kv_heads / kHeads)
//   shared    (size + 2) * 16 bytes
//   parts     clamp(floor(blocks / (batch * kv_heads * chunks)), 1, ceil(keys / 32)), at least 1, where blocks are
//             as many as the device runs of this instance at a time; any other number is right
//   kHeads    1, 2 or 4, the least that is not below heads / kv_heads, if possible: with fewer, the cache is read
//             several times. 2 for more columns than 16, and without kPacked
//   kColumns  16 for size up to 512; 32 for size up to 1024. There is none for more. 8 for size up to 256 with four
//             heads and no int8: with 16, registers are enough for two blocks only
//   kPacked   whether size * sizeof(C) is a multiple of 16. Addresses have to be, as XLA's are
//   kMore     whether there are slopes or a soft cap
template <typename T, typename C, int kHeads, int kColumns, bool kPacked, bool kMore>
__global__ void __launch_bounds__(128, kLeastBlocks<kColumns, kMore && sizeof(C) == 4>)
    decode_attention(const T* __restrict__ q, const C* __restrict__ k, const C* __restrict__ v,
                     const int* __restrict__ length, const float* alibi_slopes, const float* k_scale,
                     const float* v_scale, T* __restrict__ out, float* __restrict__ highest, float* __restrict__ sums,
                     float* __restrict__ sums_out, long long batch, long long kv_batch, long long length_batch,
                     long long keys, long long heads, long long kv_heads, long long size, long long parts,
                     long long slopes_every, long long slopes_batch, long long window, float scale, float soft_cap) {
  constexpr bool kInt8 = sizeof(C) == 1;
  constexpr int kElements = kPack<C>, kPacks = kColumns / kElements, kSteps = kColumns > 16 ? 1 : 2, kWarps = 4;
  DYN_SHARED(float, shared);  // [warps, size + 2]

  const long long group = divide(heads, kv_heads), chunks = (group + kHeads - 1) / kHeads;
  const auto [chunk, part, kv_head, b] = share_of_block(chunks, parts, kv_heads);

  const Seen seen_by = seen_keys(length, b, length_batch, keys, window);
  const long long filled = seen_by.first + seen_by.count, part_keys = keys_in_part(seen_by.count, parts);
  const long long begin = seen_by.first + part * part_keys, end = min(begin + part_keys, filled);
  if (begin >= end) return;

  unsigned lanes = 1;
  while (static_cast<long long>(lanes) * kColumns < size) lanes *= 2;
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Columns<C, kColumns, kPacked> columns(lane % lanes, lanes, size);

  const long long first_head = kv_head * group + chunk * kHeads;
  const int num_heads = static_cast<int>(min(group - chunk * kHeads, static_cast<long long>(kHeads)));
  float queries[kHeads][kColumns];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const T* const from = q + (b * heads + first_head + min(h, num_heads - 1)) * size;
    uint4 bits[kPacks];
    if constexpr (!kInt8) columns.read(from, bits);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      Floats<kElements> values;
      if constexpr (kInt8) {
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          const long long column = columns.column(p) + e;
          values.at[e] = column < size ? to_float(from[column]) : 0.0f;
        }
      } else {
        values = unpack<T>(bits[p]);
      }
#pragma unroll
      for (int e = 0; e < kElements; ++e) queries[h][p * kElements + e] = values.at[e] * (scale * kLog2E);
    }
  }
  // Slopes are read again for each key: there are no registers for them.
  const float* slopes = alibi_slopes;
  if (kMore && slopes != nullptr) slopes += slopes_of(b, slopes_every, slopes_batch, heads) + first_head;

  State<kColumns> states[kHeads];
  const long long row = kv_heads * size, b_kv = b - divide(b, kv_batch) * kv_batch;
  const long long start = (b_kv * keys * kv_heads + kv_head) * size;
  const long long at_a_time = 128 / lanes;
  // All lanes of a warp go through the same number of steps.
  for (long long key = begin; key < end; key += kSteps * at_a_time) {
    uint4 of_k[kSteps][kPacks] = {}, of_v[kSteps][kPacks] = {};
    float scale_of_k[kSteps] = {}, scale_of_v[kSteps] = {};
    bool seen[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const long long j = key + s * at_a_time + threadIdx.x / lanes;
      seen[s] = j < end;
      if (!seen[s]) continue;
      columns.read(k + start + j * row, of_k[s]);
      columns.read(v + start + j * row, of_v[s]);
      if constexpr (kInt8) {
        const long long at = (b_kv * keys + j) * kv_heads + kv_head;
        scale_of_k[s] = k_scale[at];
        scale_of_v[s] = v_scale[at];
      }
    }
    float scores[kSteps][kHeads] = {};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Floats<kElements> values = elements_of<C>(of_k[s][p]);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
#pragma unroll
          for (int e = 0; e < kElements; ++e) scores[s][h] += queries[h][p * kElements + e] * values.at[e];
        }
      }
    }
    // All scores at a time: a shuffle takes long, and those of other scores need not wait for it.
    for (unsigned other = lanes / 2; other > 0; other /= 2) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int h = 0; h < kHeads; ++h) scores[s][h] += __shfl_xor_sync(kAllLanes, scores[s][h], other);
      }
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if constexpr (kInt8) scores[s][h] *= scale_of_k[s];
        if constexpr (kMore) {
          scores[s][h] = capped(scores[s][h], soft_cap);
          const long long j = key + s * at_a_time + threadIdx.x / lanes;
          if (slopes != nullptr)
            scores[s][h] -= slopes[min(h, num_heads - 1)] * kLog2E * static_cast<float>(filled - 1 - j);
        }
        if (!seen[s]) scores[s][h] = 2 * kLowest;  // -inf, whose weight is 0
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float most = states[h].highest;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) most = fmaxf(most, scores[s][h]);
      if (most > states[h].highest) states[h].rescale(most);  // rarely, but for the first keys
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        scores[s][h] = exp2f(scores[s][h] - states[h].highest);
        states[h].sum += scores[s][h];
        if constexpr (kInt8) scores[s][h] *= scale_of_v[s];
      }
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const Floats<kElements> values = elements_of<C>(of_v[s][p]);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
#pragma unroll
          for (int e = 0; e < kElements; ++e) states[h].out[p * kElements + e] += scores[s][h] * values.at[e];
        }
      }
    }
  }

  // The keys of a warp are joined in its first lanes, and the warps in shared memory, one head after the other.
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    State<kColumns>& state = states[h];
    for (unsigned other = lanes; other < 32; other *= 2) {
      state.rescale(fmaxf(state.highest, __shfl_xor_sync(kAllLanes, state.highest, other)));
      state.sum += __shfl_xor_sync(kAllLanes, state.sum, other);
#pragma unroll
      for (int e = 0; e < kColumns; ++e) state.out[e] += __shfl_xor_sync(kAllLanes, state.out[e], other);
    }
    float* const own = shared + warp * (size + 2);
    if (lane < lanes) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          if (columns.column(p) + e < size) own[2 + columns.column(p) + e] = state.out[p * kElements + e];
        }
      }
    }
    if (lane == 0) {
      own[0] = state.highest;
      own[1] = state.sum;
    }
    __syncthreads();
    if (h < num_heads) {
      const long long place = (b * heads + first_head + h) * parts + part;
      float most = kLowest, factors[kWarps], total = 0.0f;
      for (int w = 0; w < kWarps; ++w) most = fmaxf(most, shared[w * (size + 2)]);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        factors[w] = exp2f(shared[w * (size + 2)] - most);
        total += shared[w * (size + 2) + 1] * factors[w];
      }
      for (long long i = threadIdx.x; i < size; i += 128) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += shared[w * (size + 2) + 2 + i] * factors[w];
        sums_out[place * size + i] = sum;
      }
      if (threadIdx.x == 0) {
        highest[place] = most;
        sums[place] = total;
      }
    }
    __syncthreads();
  }
}

}  // namespace eqxcallback
