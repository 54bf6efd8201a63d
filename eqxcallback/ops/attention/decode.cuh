// What the kernels of decode.cu and decode_mma.cu share: operands, parts of the keys, and the second launch.
//
// q, out [batch, heads, size] of T; k, v [kv_batch, keys, kv_heads, size] of T; length [length_batch] int32; sums are
// f32. Example b has the keys of b % kv_batch and the length of b % length_batch, clamped to 0 .. keys: what lies
// beyond is not read, and a length of 0 gives zeros. Query head h uses key/value head h / (heads / kv_heads). Each
// example's keys are divided into `parts` by its length, not by `keys`: time follows length.
//
// C is T, or int8: then k_scale and v_scale, f32 [kv_batch, keys, kv_heads], are what the integers of a head are
// multiplied by; else these are null. alibi_slopes are f32 [slopes_batch, heads], of which example b has
// b / slopes_every % slopes_batch, or null. A `window` or a `soft_cap` of 0 is none; of a window, only the last keys
// are read and divided into parts.
//
// Workspaces: highest, sums f32 [batch, heads, parts], sums_out f32 [batch, heads, parts, size]: the state of the
// softmax of a part, in units of log 2: the highest score, the sum of exp2(score - highest), and that of the values
// with these weights.
#ifndef EQXCALLBACK_DECODE_CUH
#define EQXCALLBACK_DECODE_CUH

#include "../ptx.cuh"

namespace eqxcallback {

constexpr long long kMinPartKeys = 32;
// Scores are in units of log 2.
constexpr float kLog2E = 1.44269504088896340736f;

struct Seen {
  long long first, count;
};

__device__ inline Seen seen_keys(const int* length, long long b, long long length_batch, long long keys,
                                 long long window) {
  const long long wanted = length[b - divide(b, length_batch) * length_batch];
  const long long filled = min(max(wanted, 0ll), keys), first = window > 0 ? max(filled - window, 0ll) : 0;
  return {first, filled - first};
}

// How many of them a part has. The last ones may have fewer or none.
__device__ inline long long keys_in_part(long long length, long long parts) {
  return max(divide(length + parts - 1, parts), kMinPartKeys);
}

// What a block has: some query heads of a key/value head of an example, a chunk of them, and a part of the keys.
struct Share {
  long long chunk, part, kv_head, b;
};

// Blocks that read the same keys follow each other.
__device__ inline Share share_of_block(long long chunks, long long parts, long long kv_heads) {
  Share own;
  long long rest = blockIdx.x, next = divide(rest, chunks);
  own.chunk = rest - next * chunks;
  rest = next, next = divide(rest, parts);
  own.part = rest - next * parts;
  rest = next, own.b = divide(rest, kv_heads);
  own.kv_head = rest - own.b * kv_heads;
  return own;
}

// Where the slopes of an example begin.
__device__ inline long long slopes_of(long long b, long long slopes_every, long long slopes_batch, long long heads) {
  return static_cast<unsigned>(b) / static_cast<unsigned>(slopes_every) % static_cast<unsigned>(slopes_batch) * heads;
}

__device__ inline float capped(float score, float soft_cap) {
  const float most = soft_cap * kLog2E;
  return soft_cap > 0 ? most * tanhf(score / most) : score;
}

template <typename C>
__device__ inline Floats<kPack<C>> elements_of(uint4 bits) {
  if constexpr (sizeof(C) == 1) {
    const unsigned words[4] = {bits.x, bits.y, bits.z, bits.w};
    Floats<16> values;
#pragma unroll
    for (int e = 0; e < 16; ++e) values.at[e] = static_cast<float>(static_cast<signed char>(words[e / 4] >> e % 4 * 8));
    return values;
  } else {
    return unpack<C>(bits);
  }
}

// The columns of a row that a lane has: `n` in packs, which are `lanes` packs apart. Those beyond `size` are 0.
// kPacked: rows are whole packs.
template <typename T, int n, bool kPacked>
class Columns {
 public:
  __device__ Columns(unsigned lane, unsigned lanes, long long size) : lane_(lane), lanes_(lanes), size_(size) {}

  __device__ long long column(int pack) const { return static_cast<long long>(lane_ + pack * lanes_) * kPack<T>; }

  __device__ void read(const T* row, uint4 (&bits)[n / kPack<T>]) const {
#pragma unroll
    for (int p = 0; p < n / kPack<T>; ++p) {
      bits[p] = make_uint4(0, 0, 0, 0);
      if constexpr (kPacked) {
        if (column(p) < size_) bits[p] = *reinterpret_cast<const uint4*>(row + column(p));
      } else {
        T elements[kPack<T>] = {};
#pragma unroll
        for (int e = 0; e < kPack<T>; ++e) {
          if (column(p) + e < size_) elements[e] = row[column(p) + e];
        }
        memcpy(&bits[p], static_cast<const void*>(elements), sizeof(bits[p]));
      }
    }
  }

  __device__ void write(T* row, const Floats<n>& values) const {
#pragma unroll
    for (int p = 0; p < n / kPack<T>; ++p) {
      Floats<kPack<T>> part;
#pragma unroll
      for (int e = 0; e < kPack<T>; ++e) {
        part.at[e] = values.at[p * kPack<T> + e];
        if (!kPacked && column(p) + e < size_) row[column(p) + e] = from_float<T>(part.at[e]);
      }
      if (kPacked && column(p) < size_) store(row + column(p), part);
    }
  }

 private:
  unsigned lane_, lanes_;
  long long size_;
};

// The second launch, which may begin before the first one has ended. Block (32, 8): 32 columns of a query head. Grid
// batch * heads * ceil(size / 32). No shared bytes.
template <typename T, typename C>
__global__ void __launch_bounds__(256)
    decode_attention_join(const T* __restrict__ q, const C* __restrict__ k, const C* __restrict__ v,
                          const int* __restrict__ length, const float* alibi_slopes, const float* k_scale,
                          const float* v_scale, T* __restrict__ out, float* __restrict__ highest,
                          float* __restrict__ sums, float* __restrict__ sums_out, long long batch, long long kv_batch,
                          long long length_batch, long long keys, long long heads, long long kv_heads, long long size,
                          long long parts, long long slopes_every, long long slopes_batch, long long window,
                          float scale, float soft_cap) {
  wait_for_launch_ahead();
  __shared__ float of_threads[8][32];
  const long long chunks = (size + 31) / 32, head = divide(blockIdx.x, chunks), b = divide(head, heads);
  const long long column = (blockIdx.x - head * chunks) * 32 + threadIdx.x;
  highest += head * parts;
  sums += head * parts;
  sums_out += head * parts * size;

  // A read takes longer than all that is computed here. So these begin together, and before it is known how many parts
  // there are: what nobody has written is not used.
  constexpr int kAhead = 4;
  float values[kAhead], scores[kAhead];
#pragma unroll
  for (int p = 0; p < kAhead; ++p) {
    const long long part = threadIdx.y + p * 8;
    const bool exists = part < parts && column < size;
    values[p] = exists ? sums_out[part * size + column] : 0.0f;
    scores[p] = exists ? highest[part] : 0.0f;
  }
  const bool exists = threadIdx.x < parts;
  const float own_score = exists ? highest[threadIdx.x] : 0.0f, own_sum = exists ? sums[threadIdx.x] : 0.0f;
  const long long count = seen_keys(length, b, length_batch, keys, window).count;
  const long long used = divide(count + keys_in_part(count, parts) - 1, keys_in_part(count, parts));

  // Each warp computes these two for itself.
  float most = threadIdx.x < used ? own_score : kLowest;
  for (long long part = threadIdx.x + 32; part < used; part += 32) most = fmaxf(most, highest[part]);
  most = reduce_warp<Max>(most);
  float total = threadIdx.x < used ? own_sum * exp2f(own_score - most) : 0.0f;
  for (long long part = threadIdx.x + 32; part < used; part += 32) total += sums[part] * exp2f(highest[part] - most);
  total = reduce_warp<Add>(total);

  float sum = 0.0f;
#pragma unroll
  for (int p = 0; p < kAhead; ++p) {
    if (threadIdx.y + p * 8 < used && column < size) sum += values[p] * exp2f(scores[p] - most);
  }
  if (column < size) {
#pragma unroll 4
    for (long long part = threadIdx.y + kAhead * 8; part < used; part += 8) {
      sum += sums_out[part * size + column] * exp2f(highest[part] - most);
    }
  }
  of_threads[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= size) return;
  for (int y = 1; y < 8; ++y) sum += of_threads[y][threadIdx.x];
  out[head * size + column] = from_float<T>(total == 0.0f ? 0.0f : sum / total);
}

}  // namespace eqxcallback

#endif  // EQXCALLBACK_DECODE_CUH
