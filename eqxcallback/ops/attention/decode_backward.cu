// Gradients of the attention of one token over a cache, in three or four launches with the same parameters. See
// decode.cuh for the operands, and for the parts of the keys.
//
// With weights p, dp = dout . v and delta = sum(p * dp): ds = p * (dp - delta), dq = scale * sum(ds * k), dk = scale *
// ds * q, dv = p * dout. With a soft cap, ds is multiplied by its derivative there. The cache is read twice: the
// softmax of all keys has to be known before the gradient of one. dq needs no second pass, as it is scale * (sum(p * dp
// * k) - delta * sum(p * k)): blocks take parts of the cache, and the second launch joins them. So it is for the slope
// of a head, -sum(ds * distance). `out` is not read.
//
// Integers of a cache in int8 have no gradients. Their scales have: the sums of dk and of dv times the integers, which
// are ds * scale * (q . integers) and p * (dout . integers).
//
// A gradient that is not needed is null. Without those of the cache there is no third launch, and without that of
// slopes no fourth. Several examples may share the keys of one: then their gradients are added up.
//
// Workspaces: states f32 [batch, heads, parts, kOfPart], the highest score of a part, the sum of exp2(score - highest),
// that of dp with these weights, and with slopes these two sums of what is multiplied by the distance too; sums f32
// [batch, heads, parts, 2, size], of k with these weights times dp, and with these weights; of_rows f32 [batch, heads,
// kOfRow], the highest score of all, 1 / the sum, delta, and the gradient of the slope.
#include "decode_backward.cuh"

namespace eqxcallback {

// Block 128, grid as that of decode_attention, shared (2 * size + kOfPart) * 16 bytes. A lane has kOwn columns of a
// row: 8 for size up to 256, 16 up to 512 and for int8, 32 up to 1024. kHeads is 1, 2 or 4, and at most 32 / kOwn.
template <typename T, typename C, int kHeads, int kOwn, bool kPacked, bool kCapped, bool kSloped>
__global__ void __launch_bounds__(128, 32 == kHeads * kOwn ? 2 : 3)
    decode_attention_backward(const T* __restrict__ q, const C* __restrict__ k, const C* __restrict__ v,
                              const int* __restrict__ length, const float* alibi_slopes, const float* k_scale,
                              const float* v_scale, const T* out, const T* __restrict__ dout, T* dq, C* dk, C* dv,
                              int* dlength, float* dslopes, float* dk_scale, float* dv_scale, float* states,
                              float* sums, float* of_rows, long long batch, long long kv_batch, long long length_batch,
                              long long keys, long long heads, long long kv_heads, long long size, long long parts,
                              long long slopes_every, long long slopes_batch, long long window, float scale,
                              float soft_cap) {
  constexpr bool kInt8 = sizeof(C) == 1;
  constexpr int kPacks = kOwn / kPack<C>, kSteps = kPacks > 2 ? 1 : 2, kWarps = 4, kState = kOfPart<kSloped>;
  DYN_SHARED(float, shared);  // [warps, kState + 2 * size]

  const long long group = divide(heads, kv_heads), chunks = (group + kHeads - 1) / kHeads;
  const auto [chunk, part, kv_head, b] = share_of_block(chunks, parts, kv_heads);
  const Seen seen_by = seen_keys(length, b, length_batch, keys, window);
  const long long filled = seen_by.first + seen_by.count, part_keys = keys_in_part(seen_by.count, parts);
  const long long begin = seen_by.first + part * part_keys, end = min(begin + part_keys, filled);
  if (begin >= end) return;

  const unsigned lanes = lanes_of_row<kOwn>(size), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Columns<C, kOwn, kPacked> columns(lane % lanes, lanes, size);
  const long long first_head = kv_head * group + chunk * kHeads;
  const int num_heads = static_cast<int>(min(group - chunk * kHeads, static_cast<long long>(kHeads)));
  Floats<kOwn> queries[kHeads], upstream[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const long long row = (b * heads + first_head + min(h, num_heads - 1)) * size;
    queries[h] = own_columns(columns, q + row, size, scale * kLog2E);
    upstream[h] = own_columns(columns, dout + row, size, 1.0f);
  }
  // Slopes are read again for each key: there are no registers for them.
  const float* slopes = alibi_slopes;
  if constexpr (kSloped) slopes += slopes_of(b, slopes_every, slopes_batch, heads) + first_head;

  Sums<kOwn, kSloped> partials[kHeads];
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
    float scores[kSteps][kHeads], products[kSteps][kHeads];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const Floats<kOwn> k_row = own_columns<C, kOwn>(of_k[s]), v_row = own_columns<C, kOwn>(of_v[s]);
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
      const Floats<kOwn> k_row = own_columns<C, kOwn>(of_k[s]);
      const float distance = static_cast<float>(filled - 1 - (key + s * at_a_time + threadIdx.x / lanes));
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if constexpr (kInt8) {
          scores[s][h] *= scale_of_k[s];
          products[s][h] *= scale_of_v[s];
        }
        Score<kCapped> of(scores[s][h], soft_cap);
        if constexpr (kSloped) of.value -= kLog2E * slopes[min(h, num_heads - 1)] * distance;
        const float score = seen[s] ? of.value : 2 * kLowest;  // -inf, whose weight is 0
        if (score > partials[h].highest) partials[h].rescale(score);
        const float weight = exp2f(score - partials[h].highest), product = weight * products[s][h];
        partials[h].sum += weight;
        partials[h].product += product;
        if constexpr (kSloped) {
          partials[h].far_product += product * distance;
          partials[h].far_sum += weight * distance;
        }
        const float factor = kInt8 ? of.slope * scale_of_k[s] : of.slope;
#pragma unroll
        for (int c = 0; c < kOwn; ++c) {
          partials[h].of_products[c] += product * factor * k_row.at[c];
          partials[h].of_keys[c] += weight * factor * k_row.at[c];
        }
      }
    }
  }

  // The keys of a warp are joined in its first lanes, and the warps in shared memory, one head after the other.
  const long long stride = kState + 2 * size;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    Sums<kOwn, kSloped>& of_head = partials[h];
    for (unsigned other = lanes; other < 32; other *= 2) {
      of_head.rescale(fmaxf(of_head.highest, __shfl_xor_sync(kAllLanes, of_head.highest, other)));
      of_head.sum += __shfl_xor_sync(kAllLanes, of_head.sum, other);
      of_head.product += __shfl_xor_sync(kAllLanes, of_head.product, other);
      if constexpr (kSloped) {
        of_head.far_product += __shfl_xor_sync(kAllLanes, of_head.far_product, other);
        of_head.far_sum += __shfl_xor_sync(kAllLanes, of_head.far_sum, other);
      }
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
        const long long column = columns.column(c / kPack<C>) + c % kPack<C>;
        if (column >= size) continue;
        to[kState + column] = of_head.of_products[c];
        to[kState + size + column] = of_head.of_keys[c];
      }
    }
    if (lane == 0) {
      to[0] = of_head.highest;
      to[1] = of_head.sum;
      to[2] = of_head.product;
      if constexpr (kSloped) {
        to[3] = of_head.far_product;
        to[4] = of_head.far_sum;
      }
    }
    __syncthreads();
    if (h < num_heads) {
      const long long place = (b * heads + first_head + h) * parts + part;
      float most = kLowest, factors[kWarps];
      for (int w = 0; w < kWarps; ++w) most = fmaxf(most, shared[w * stride]);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) factors[w] = exp2f(shared[w * stride] - most);
#pragma unroll 1  // it runs once or a few times
      for (long long i = threadIdx.x; i < kState - 1 + 2 * size; i += 128) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += shared[w * stride + 1 + i] * factors[w];
        if (i < kState - 1) {
          states[kState * place + 1 + i] = sum;
        } else {
          sums[2 * place * size + i - (kState - 1)] = sum;
        }
      }
      if (threadIdx.x == 0) states[kState * place] = most;
    }
    __syncthreads();
  }
}

// Block (32, 8): 32 columns of a query head. Grid batch * heads * max(ceil(size / 32), 1). No shared bytes.
template <typename T, typename C, bool kSloped>
__global__ void __launch_bounds__(256)
    decode_attention_backward_join(const T* q, const C* k, const C* v, const int* __restrict__ length,
                                   const float* alibi_slopes, const float* k_scale, const float* v_scale, const T* out,
                                   const T* dout, T* dq, C* dk, C* dv, int* dlength, float* dslopes, float* dk_scale,
                                   float* dv_scale, float* states, float* sums, float* of_rows, long long batch,
                                   long long kv_batch, long long length_batch, long long keys, long long heads,
                                   long long kv_heads, long long size, long long parts, long long slopes_every,
                                   long long slopes_batch, long long window, float scale, float soft_cap) {
  constexpr int kState = kOfPart<kSloped>, kRow = kOfRow<kSloped>;
  __shared__ float of_threads[2][8][32];
  const long long chunks = size > 32 ? (size + 31) / 32 : 1, head = divide(blockIdx.x, chunks), b = divide(head, heads);
  const long long first = (blockIdx.x - head * chunks) * 32, column = first + threadIdx.x;
  const long long count = seen_keys(length, b, length_batch, keys, window).count;
  const long long used = divide(count + keys_in_part(count, parts) - 1, keys_in_part(count, parts));
  states += kState * head * parts;
  sums += 2 * head * parts * size;

  // Each warp computes these for itself.
  float most = kLowest, total = 0.0f, product = 0.0f;
  for (long long part = threadIdx.x; part < used; part += 32) most = fmaxf(most, states[kState * part]);
  most = reduce_warp<Max>(most);
  for (long long part = threadIdx.x; part < used; part += 32) {
    const float factor = exp2f(states[kState * part] - most);
    total += states[kState * part + 1] * factor;
    product += states[kState * part + 2] * factor;
  }
  total = reduce_warp<Add>(total);
  product = reduce_warp<Add>(product);
  const float inverse = total == 0.0f ? 0.0f : 1.0f / total, delta = product * inverse;
  if (first == 0 && threadIdx.x == 0 && threadIdx.y == 0) {
    of_rows[kRow * head] = most;
    of_rows[kRow * head + 1] = inverse;
    of_rows[kRow * head + 2] = delta;
  }
  if (kSloped && dslopes != nullptr && first == 0 && threadIdx.y == 0) {
    float far_product = 0.0f, far_sum = 0.0f;
    for (long long part = threadIdx.x; part < used; part += 32) {
      const float factor = exp2f(states[kState * part] - most);
      far_product += states[kState * part + 3] * factor;
      far_sum += states[kState * part + 4] * factor;
    }
    far_product = reduce_warp<Add>(far_product);
    far_sum = reduce_warp<Add>(far_sum);
    if (threadIdx.x == 0) of_rows[kRow * head + 3] = inverse * (delta * far_sum - far_product);
  }
  if (dq == nullptr) return;
  float of_products = 0.0f, of_keys = 0.0f;
  if (column < size) {
#pragma unroll 4
    for (long long part = threadIdx.y; part < used; part += 8) {
      const float factor = exp2f(states[kState * part] - most);
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

// dk and dv, or those of their scales. `lanes` threads have a row of each of kSteps keys, which no other block has.
// kOwn as in the first launch. Block 128, grid kv_batch * kv_heads * ceil(keys / (kSteps * 128 / lanes)), where lanes =
// pow2(ceil(size / kOwn)) and kSteps = 32 / kOwn, for int8 4. No shared bytes.
template <typename T, typename C, int kOwn, bool kPacked, bool kCapped, bool kSloped>
__global__ void __launch_bounds__(128, kOwn == 16 && sizeof(C) > 1 ? 2 : 0)
    decode_attention_backward_keys(const T* __restrict__ q, const C* __restrict__ k, const C* __restrict__ v,
                                   const int* __restrict__ length, const float* alibi_slopes, const float* k_scale,
                                   const float* v_scale, const T* out, const T* __restrict__ dout, T* dq, C* dk, C* dv,
                                   int* dlength, float* dslopes, float* dk_scale, float* dv_scale, float* states,
                                   float* sums, const float* __restrict__ of_rows, long long batch, long long kv_batch,
                                   long long length_batch, long long keys, long long heads, long long kv_heads,
                                   long long size, long long parts, long long slopes_every, long long slopes_batch,
                                   long long window, float scale, float soft_cap) {
  constexpr bool kInt8 = sizeof(C) == 1;
  constexpr int kPacks = kOwn / kPack<C>, kSteps = kInt8 ? 4 : 32 / kOwn, kRow = kOfRow<kSloped>;
  const unsigned lanes = lanes_of_row<kOwn>(size);
  const Columns<C, kOwn, kPacked> columns(threadIdx.x % lanes, lanes, size);
  const long long at_a_time = 128 / lanes, in_block = kSteps * at_a_time, blocks = (keys + in_block - 1) / in_block;
  const long long of_kv = divide(blockIdx.x, blocks), first_key = (blockIdx.x - of_kv * blocks) * in_block;
  const long long b_kv = divide(of_kv, kv_heads), kv_head = of_kv - b_kv * kv_heads, group = divide(heads, kv_heads);
  const long long row = kv_heads * size, start = (b_kv * keys * kv_heads + kv_head) * size;

  uint4 of_k[kSteps][kPacks] = {}, of_v[kSteps][kPacks] = {};
  // Of int8 those of scales.
  Floats<kInt8 ? 1 : kOwn> d_k[kSteps] = {}, d_v[kSteps] = {};
  float scale_of_k[kSteps] = {}, scale_of_v[kSteps] = {};
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
        if constexpr (kInt8) {
          const long long at = (b_kv * keys + j) * kv_heads + kv_head;
          scale_of_k[s] = k_scale[at];
          scale_of_v[s] = v_scale[at];
        }
      }
      is_read = true;
    }
    for (long long head = b * heads + kv_head * group; head < b * heads + (kv_head + 1) * group; ++head) {
      const Floats<kOwn> query = own_columns(columns, q + head * size, size, scale * kLog2E);
      const Floats<kOwn> upstream = own_columns(columns, dout + head * size, size, 1.0f);
      const float most = of_rows[kRow * head], inverse = of_rows[kRow * head + 1], delta = of_rows[kRow * head + 2];
      float alibi_slope;
      if constexpr (kSloped) {
        alibi_slope = alibi_slopes[slopes_of(b, slopes_every, slopes_batch, heads) + head - b * heads];
      }
      float scores[kSteps], products[kSteps];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        scores[s] = dot(query, own_columns<C, kOwn>(of_k[s]));
        products[s] = dot(upstream, own_columns<C, kOwn>(of_v[s]));
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
        const float raw = kInt8 ? scores[s] * scale_of_k[s] : scores[s];
        const float product = kInt8 ? products[s] * scale_of_v[s] : products[s];
        Score<kCapped> of(raw, soft_cap);
        if constexpr (kSloped) of.value -= kLog2E * alibi_slope * static_cast<float>(filled - 1 - j);
        const float weight = exp2f(fminf(of.value - most, 0.0f)) * inverse;
        const float change = weight * (product - delta) * of.slope * (1.0f / kLog2E);
        if constexpr (kInt8) {
          d_k[s].at[0] += change * scores[s];
          d_v[s].at[0] += weight * products[s];
        } else {
#pragma unroll
          for (int c = 0; c < kOwn; ++c) {
            d_k[s].at[c] += change * query.at[c];
            d_v[s].at[c] += weight * upstream.at[c];
          }
        }
      }
    }
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const long long j = first_key + s * at_a_time + threadIdx.x / lanes;
    if (j >= keys) continue;
    if constexpr (kInt8) {
      if (threadIdx.x % lanes != 0) continue;
      const long long at = (b_kv * keys + j) * kv_heads + kv_head;
      if (dk_scale != nullptr) dk_scale[at] = d_k[s].at[0];
      if (dv_scale != nullptr) dv_scale[at] = d_v[s].at[0];
    } else {
      if (dk != nullptr) columns.write(dk + start + j * row, d_k[s]);
      if (dv != nullptr) columns.write(dv + start + j * row, d_v[s]);
    }
  }
}

// dslopes, the sums over the examples that have a slope. Block 128, grid ceil(slopes_batch * heads / 128). No shared
// bytes.
template <typename T, typename C>
__global__ void __launch_bounds__(128)
    decode_attention_backward_slopes(const T* q, const C* k, const C* v, const int* length, const float* alibi_slopes,
                                     const float* k_scale, const float* v_scale, const T* out, const T* dout, T* dq,
                                     C* dk, C* dv, int* dlength, float* dslopes, float* dk_scale, float* dv_scale,
                                     float* states, float* sums, const float* __restrict__ of_rows, long long batch,
                                     long long kv_batch, long long length_batch, long long keys, long long heads,
                                     long long kv_heads, long long size, long long parts, long long slopes_every,
                                     long long slopes_batch, long long window, float scale, float soft_cap) {
  const long long own = blockIdx.x * 128ll + threadIdx.x;
  if (own >= slopes_batch * heads) return;
  const long long place = divide(own, heads), head = own - place * heads;
  float sum = 0.0f;
  for (long long first = place * slopes_every; first < batch; first += slopes_batch * slopes_every) {
    for (long long b = first; b < first + slopes_every; ++b) sum += of_rows[kOfRow<true> * (b * heads + head) + 3];
  }
  dslopes[own] = sum;
}

}  // namespace eqxcallback
