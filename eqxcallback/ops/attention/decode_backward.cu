// Gradients of the attention of one token over a cache, for q, k and v, in three launches with the same parameters. See
// decode.cuh for the operands, and for the parts of the keys. There are no slopes, and no cache in int8.
//
// With weights p, dp = dout . v and delta = sum(p * dp): ds = p * (dp - delta), dq = scale * sum(ds * k), dk = scale *
// ds * q, dv = p * dout. With a soft cap, ds is multiplied by its derivative. The cache is read twice: the softmax of
// all keys has to be known before the gradient of one. dq needs no second pass, as it is scale * (sum(p * dp * k) -
// delta * sum(p * k)): blocks take parts of the cache, and the second launch joins them. `out` is not read.
//
// A gradient that is not needed is null; without dk and dv there is no third launch. Several examples may share the
// keys of one: then their gradients are added up.
//
// Workspaces: states f32 [batch, heads, parts, 3], the highest score of a part, the sum of exp2(score - highest), and
// that of dp with these weights; sums f32 [batch, heads, parts, 2, size], of k with these weights times dp, and with
// these weights; of_rows f32 [batch, heads, 3], the highest score of all, 1 / the sum, and delta.
#include "decode.cuh"

namespace eqxcallback {

// What a lane has of a row. Heads are no longer than 256.
constexpr int kOwn = 8;

template <typename T>
__device__ inline Floats<kOwn> own_columns(const uint4 (&bits)[kOwn / kPack<T>]) {
  Floats<kOwn> values;
#pragma unroll
  for (int p = 0; p < kOwn / kPack<T>; ++p) {
    const Floats<kPack<T>> part = unpack<T>(bits[p]);
#pragma unroll
    for (int e = 0; e < kPack<T>; ++e) values.at[p * kPack<T> + e] = part.at[e];
  }
  return values;
}

// Times a factor.
template <typename T, bool kPacked>
__device__ inline Floats<kOwn> own_columns(const Columns<T, kOwn, kPacked>& columns, const T* row, float factor) {
  uint4 bits[kOwn / kPack<T>];
  columns.read(row, bits);
  Floats<kOwn> values = own_columns<T>(bits);
#pragma unroll
  for (int c = 0; c < kOwn; ++c) values.at[c] *= factor;
  return values;
}

__device__ inline float dot(const Floats<kOwn>& a, const Floats<kOwn>& b) {
  float sum = 0.0f;
#pragma unroll
  for (int c = 0; c < kOwn; ++c) sum += a.at[c] * b.at[c];
  return sum;
}

// A score, and its derivative by what it was before the cap.
template <bool kCapped>
struct Score {
  float value, slope;
  __device__ Score(float raw, float soft_cap) : value(raw), slope(1.0f) {
    if constexpr (kCapped) {
      value = capped(raw, soft_cap);
      const float share = value / (soft_cap * kLog2E);
      slope = 1.0f - share * share;
    }
  }
};

// Lanes that have one row, a power of two.
__device__ inline unsigned lanes_of_row(long long size) {
  unsigned lanes = 1;
  while (static_cast<long long>(lanes) * kOwn < size) lanes *= 2;
  return lanes;
}

// Some keys for one query head.
struct Sums {
  float highest = kLowest, sum = 0.0f, product = 0.0f;
  float of_products[kOwn] = {}, of_keys[kOwn] = {};

  // As if they had seen that highest score.
  __device__ void rescale(float next) {
    const float factor = exp2f(highest - next);
    highest = next;
    sum *= factor;
    product *= factor;
#pragma unroll
    for (int c = 0; c < kOwn; ++c) {
      of_products[c] *= factor;
      of_keys[c] *= factor;
    }
  }
};

// Block 128, grid and kHeads as those of decode_attention, shared (2 * size + 3) * 16 bytes.
template <typename T, int kHeads, bool kPacked, bool kCapped>
__global__ void __launch_bounds__(128, kHeads == 4 ? 2 : 3)
    decode_attention_backward(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                              const int* __restrict__ length, const float* alibi_slopes, const float* k_scale,
                              const float* v_scale, const T* out, const T* __restrict__ dout, T* dq, T* dk, T* dv,
                              int* dlength, float* dslopes, float* dk_scale, float* dv_scale, float* states,
                              float* sums, float* of_rows, long long batch, long long kv_batch, long long length_batch,
                              long long keys, long long heads, long long kv_heads, long long size, long long parts,
                              long long window, float scale, float soft_cap) {
  constexpr int kPacks = kOwn / kPack<T>, kSteps = 2, kWarps = 4;
  DYN_SHARED(float, shared);  // [warps, 3 + 2 * size]

  const long long group = divide(heads, kv_heads), chunks = (group + kHeads - 1) / kHeads;
  const auto [chunk, part, kv_head, b] = share_of_block(chunks, parts, kv_heads);
  const Seen seen_by = seen_keys(length, b, length_batch, keys, window);
  const long long filled = seen_by.first + seen_by.count, part_keys = keys_in_part(seen_by.count, parts);
  const long long begin = seen_by.first + part * part_keys, end = min(begin + part_keys, filled);
  if (begin >= end) return;

  const unsigned lanes = lanes_of_row(size), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Columns<T, kOwn, kPacked> columns(lane % lanes, lanes, size);
  const long long first_head = kv_head * group + chunk * kHeads;
  const int num_heads = static_cast<int>(min(group - chunk * kHeads, static_cast<long long>(kHeads)));
  Floats<kOwn> queries[kHeads], upstream[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const long long row = (b * heads + first_head + min(h, num_heads - 1)) * size;
    queries[h] = own_columns<T>(columns, q + row, scale * kLog2E);
    upstream[h] = own_columns<T>(columns, dout + row, 1.0f);
  }

  Sums partials[kHeads];
  const long long row = kv_heads * size, b_kv = b - divide(b, kv_batch) * kv_batch;
  const long long start = (b_kv * keys * kv_heads + kv_head) * size;
  const long long at_a_time = 128 / lanes;
  // All lanes of a warp go through the same number of steps.
  for (long long key = begin; key < end; key += kSteps * at_a_time) {
    uint4 of_k[kSteps][kPacks] = {}, of_v[kSteps][kPacks] = {};
    bool seen[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const long long j = key + s * at_a_time + threadIdx.x / lanes;
      seen[s] = j < end;
      if (!seen[s]) continue;
      columns.read(k + start + j * row, of_k[s]);
      columns.read(v + start + j * row, of_v[s]);
    }
    float scores[kSteps][kHeads], products[kSteps][kHeads];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const Floats<kOwn> k_row = own_columns<T>(of_k[s]), v_row = own_columns<T>(of_v[s]);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        scores[s][h] = dot(queries[h], k_row);
        products[s][h] = dot(upstream[h], v_row);
      }
    }
    for (unsigned other = lanes / 2; other > 0; other /= 2) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          scores[s][h] += __shfl_xor_sync(kAllLanes, scores[s][h], other);
          products[s][h] += __shfl_xor_sync(kAllLanes, products[s][h], other);
        }
      }
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const Floats<kOwn> k_row = own_columns<T>(of_k[s]);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const Score<kCapped> of(scores[s][h], soft_cap);
        const float score = seen[s] ? of.value : 2 * kLowest;  // -inf, whose weight is 0
        if (score > partials[h].highest) partials[h].rescale(score);
        const float weight = exp2f(score - partials[h].highest), product = weight * products[s][h];
        partials[h].sum += weight;
        partials[h].product += product;
#pragma unroll
        for (int c = 0; c < kOwn; ++c) {
          partials[h].of_products[c] += product * of.slope * k_row.at[c];
          partials[h].of_keys[c] += weight * of.slope * k_row.at[c];
        }
      }
    }
  }

  // The keys of a warp are joined in its first lanes, and the warps in shared memory, one head after the other.
  const long long stride = 3 + 2 * size;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    Sums& of_head = partials[h];
    for (unsigned other = lanes; other < 32; other *= 2) {
      of_head.rescale(fmaxf(of_head.highest, __shfl_xor_sync(kAllLanes, of_head.highest, other)));
      of_head.sum += __shfl_xor_sync(kAllLanes, of_head.sum, other);
      of_head.product += __shfl_xor_sync(kAllLanes, of_head.product, other);
#pragma unroll
      for (int c = 0; c < kOwn; ++c) {
        of_head.of_products[c] += __shfl_xor_sync(kAllLanes, of_head.of_products[c], other);
        of_head.of_keys[c] += __shfl_xor_sync(kAllLanes, of_head.of_keys[c], other);
      }
    }
    float* const to = shared + warp * stride;
    if (lane < lanes) {
#pragma unroll
      for (int c = 0; c < kOwn; ++c) {
        const long long column = columns.column(c / kPack<T>) + c % kPack<T>;
        if (column >= size) continue;
        to[3 + column] = of_head.of_products[c];
        to[3 + size + column] = of_head.of_keys[c];
      }
    }
    if (lane == 0) {
      to[0] = of_head.highest;
      to[1] = of_head.sum;
      to[2] = of_head.product;
    }
    __syncthreads();
    if (h < num_heads) {
      const long long place = (b * heads + first_head + h) * parts + part;
      float most = kLowest, factors[kWarps];
      for (int w = 0; w < kWarps; ++w) most = fmaxf(most, shared[w * stride]);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) factors[w] = exp2f(shared[w * stride] - most);
#pragma unroll 1  // it runs once or a few times
      for (long long i = threadIdx.x; i < 2 + 2 * size; i += 128) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += shared[w * stride + 1 + i] * factors[w];
        if (i < 2) {
          states[3 * place + 1 + i] = sum;
        } else {
          sums[2 * place * size + i - 2] = sum;
        }
      }
      if (threadIdx.x == 0) states[3 * place] = most;
    }
    __syncthreads();
  }
}

// Block (32, 8): 32 columns of a query head. Grid batch * heads * ceil(size / 32). No shared bytes.
template <typename T>
__global__ void __launch_bounds__(256)
    decode_attention_backward_join(const T* q, const T* k, const T* v, const int* __restrict__ length,
                                   const float* alibi_slopes, const float* k_scale, const float* v_scale, const T* out,
                                   const T* dout, T* dq, T* dk, T* dv, int* dlength, float* dslopes, float* dk_scale,
                                   float* dv_scale, float* states, float* sums, float* of_rows, long long batch,
                                   long long kv_batch, long long length_batch, long long keys, long long heads,
                                   long long kv_heads, long long size, long long parts, long long window, float scale,
                                   float soft_cap) {
  __shared__ float of_threads[2][8][32];
  const long long chunks = (size + 31) / 32, head = divide(blockIdx.x, chunks), b = divide(head, heads);
  const long long first = (blockIdx.x - head * chunks) * 32, column = first + threadIdx.x;
  const long long count = seen_keys(length, b, length_batch, keys, window).count;
  const long long used = divide(count + keys_in_part(count, parts) - 1, keys_in_part(count, parts));
  states += 3 * head * parts;
  sums += 2 * head * parts * size;

  // Each warp computes these for itself.
  float most = kLowest, total = 0.0f, product = 0.0f;
  for (long long part = threadIdx.x; part < used; part += 32) most = fmaxf(most, states[3 * part]);
  most = reduce_warp<Max>(most);
  for (long long part = threadIdx.x; part < used; part += 32) {
    const float factor = exp2f(states[3 * part] - most);
    total += states[3 * part + 1] * factor;
    product += states[3 * part + 2] * factor;
  }
  total = reduce_warp<Add>(total);
  product = reduce_warp<Add>(product);
  const float inverse = total == 0.0f ? 0.0f : 1.0f / total, delta = product * inverse;
  if (first == 0 && threadIdx.x == 0 && threadIdx.y == 0) {
    of_rows[3 * head] = most;
    of_rows[3 * head + 1] = inverse;
    of_rows[3 * head + 2] = delta;
  }
  if (dq == nullptr) return;
  float of_products = 0.0f, of_keys = 0.0f;
  if (column < size) {
#pragma unroll 4
    for (long long part = threadIdx.y; part < used; part += 8) {
      const float factor = exp2f(states[3 * part] - most);
      of_products += sums[2 * part * size + column] * factor;
      of_keys += sums[(2 * part + 1) * size + column] * factor;
    }
  }
  of_threads[0][threadIdx.y][threadIdx.x] = of_products;
  of_threads[1][threadIdx.y][threadIdx.x] = of_keys;
  __syncthreads();
  if (threadIdx.y != 0 || column >= size) return;
  for (int y = 1; y < 8; ++y) {
    of_products += of_threads[0][y][threadIdx.x];
    of_keys += of_threads[1][y][threadIdx.x];
  }
  dq[head * size + column] = from_float<T>(scale * inverse * (of_products - delta * of_keys));
}

// dk and dv. `lanes` threads have a row of each of kSteps keys, which no other block has. Block 128, grid kv_batch *
// kv_heads * ceil(keys / (kSteps * 128 / lanes)), where lanes = pow2(ceil(size / 8)) and kSteps = 4. No shared bytes.
template <typename T, bool kPacked, bool kCapped>
__global__ void __launch_bounds__(128)
    decode_attention_backward_keys(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                                   const int* __restrict__ length, const float* alibi_slopes, const float* k_scale,
                                   const float* v_scale, const T* out, const T* __restrict__ dout, T* dq, T* dk, T* dv,
                                   int* dlength, float* dslopes, float* dk_scale, float* dv_scale, float* states,
                                   float* sums, const float* __restrict__ of_rows, long long batch, long long kv_batch,
                                   long long length_batch, long long keys, long long heads, long long kv_heads,
                                   long long size, long long parts, long long window, float scale, float soft_cap) {
  constexpr int kPacks = kOwn / kPack<T>, kSteps = 4;
  const unsigned lanes = lanes_of_row(size);
  const Columns<T, kOwn, kPacked> columns(threadIdx.x % lanes, lanes, size);
  const long long at_a_time = 128 / lanes, in_block = kSteps * at_a_time, blocks = (keys + in_block - 1) / in_block;
  const long long of_kv = divide(blockIdx.x, blocks), first_key = (blockIdx.x - of_kv * blocks) * in_block;
  const long long b_kv = divide(of_kv, kv_heads), kv_head = of_kv - b_kv * kv_heads, group = divide(heads, kv_heads);
  const long long row = kv_heads * size, start = (b_kv * keys * kv_heads + kv_head) * size;

  uint4 of_k[kSteps][kPacks] = {}, of_v[kSteps][kPacks] = {};
  Floats<kOwn> d_k[kSteps] = {}, d_v[kSteps] = {};
  bool is_read = false;
  for (long long b = b_kv; b < batch; b += kv_batch) {
    const Seen seen = seen_keys(length, b, length_batch, keys, window);
    const long long filled = seen.first + seen.count;
    if (first_key >= filled || first_key + in_block <= seen.first) continue;
    if (!is_read) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const long long j = first_key + s * at_a_time + threadIdx.x / lanes;
        if (j >= keys) continue;
        columns.read(k + start + j * row, of_k[s]);
        columns.read(v + start + j * row, of_v[s]);
      }
      is_read = true;
    }
    for (long long head = b * heads + kv_head * group; head < b * heads + (kv_head + 1) * group; ++head) {
      const Floats<kOwn> query = own_columns<T>(columns, q + head * size, scale * kLog2E);
      const Floats<kOwn> upstream = own_columns<T>(columns, dout + head * size, 1.0f);
      const float most = of_rows[3 * head], inverse = of_rows[3 * head + 1], delta = of_rows[3 * head + 2];
      float scores[kSteps], products[kSteps];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        scores[s] = dot(query, own_columns<T>(of_k[s]));
        products[s] = dot(upstream, own_columns<T>(of_v[s]));
      }
      for (unsigned other = lanes / 2; other > 0; other /= 2) {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          scores[s] += __shfl_xor_sync(kAllLanes, scores[s], other);
          products[s] += __shfl_xor_sync(kAllLanes, products[s], other);
        }
      }
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const long long j = first_key + s * at_a_time + threadIdx.x / lanes;
        if (j < seen.first || j >= filled) continue;  // its products may be NaN
        const Score<kCapped> of(scores[s], soft_cap);
        const float weight = exp2f(fminf(of.value - most, 0.0f)) * inverse;
        const float change = weight * (products[s] - delta) * of.slope * (1.0f / kLog2E);
#pragma unroll
        for (int c = 0; c < kOwn; ++c) {
          d_k[s].at[c] += change * query.at[c];
          d_v[s].at[c] += weight * upstream.at[c];
        }
      }
    }
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const long long j = first_key + s * at_a_time + threadIdx.x / lanes;
    if (j >= keys) continue;
    if (dk != nullptr) columns.write(dk + start + j * row, d_k[s]);
    if (dv != nullptr) columns.write(dv + start + j * row, d_v[s]);
  }
}

}  // namespace eqxcallback
