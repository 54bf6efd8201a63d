// Rotary position embedding (https://arxiv.org/abs/2104.09864), forward and backward: element i and element size / 2 +
// i of a head are a pair, rotated by an angle of its row.
//
// x, out [rows, heads, size] of T, where rows has all batch axes; cos, sin [table_rows, size / 2] f32, of which row r
// has r % table_rows. A thread has kHeads heads of a row, so that it loads its angles once.
#include "../common.cuh"

namespace eqxcallback {

template <int n>
struct Pair {
  Floats<n> a, b;
};

template <int n, typename T>
__device__ inline Pair<n> load_pair(const T* from, long long half) {
  return {load<n>(from), load<n>(from + half)};
}

// kInverse: by the negative angle.
template <bool kInverse, int n>
__device__ inline void turn(Pair<n>& pair, const Floats<n>& cos, const Floats<n>& sin) {
#pragma unroll
  for (int e = 0; e < n; ++e) {
    const float a = pair.a.at[e], b = pair.b.at[e], sine = kInverse ? -sin.at[e] : sin.at[e];
    pair.a.at[e] = a * cos.at[e] - b * sine;
    pair.b.at[e] = b * cos.at[e] + a * sine;
  }
}

// One of kHeads heads after the other, `n` pairs at a time.
template <int n, bool kInverse, typename T>
__device__ inline void rotate(const T* __restrict__ x, const float* __restrict__ cos, const float* __restrict__ sin,
                              T* __restrict__ out, long long rows, long long table_rows, long long heads,
                              long long half) {
  constexpr int kHeads = 4;
  const long long columns = half / n, groups = divide(heads + kHeads - 1, kHeads), total = rows * groups * columns;
  const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += stride) {
    const long long rest = divide(i, columns), column = (i - rest * columns) * n;
    const long long row = divide(rest, groups), first = (rest - row * groups) * kHeads;
    const long long angle = (row - divide(row, table_rows) * table_rows) * half + column;
    const Floats<n> c = load<n>(cos + angle), s = load<n>(sin + angle);
    const long long start = (row * heads + first) * 2 * half + column;
    Pair<n> pairs[kHeads];  // all of them are on their way at a time
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (first + h < heads) pairs[h] = load_pair<n>(x + start + h * 2 * half, half);
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (first + h >= heads) break;
      turn<kInverse>(pairs[h], c, s);
      store(out + start + h * 2 * half, pairs[h].a);
      store(out + start + (h * 2 + 1) * half, pairs[h].b);
    }
  }
}

template <bool kInverse, typename T>
__device__ inline void rotate_all(const T* __restrict__ x, const float* __restrict__ cos, const float* __restrict__ sin,
                                  T* __restrict__ out, long long rows, long long table_rows, long long heads,
                                  long long size) {
  const long long half = size / 2;
  if (half % kPack<T> == 0 && is_aligned(x) && is_aligned(out) && is_aligned(cos) && is_aligned(sin)) {
    rotate<kPack<T>, kInverse>(x, cos, sin, out, rows, table_rows, heads, half);
  } else {
    rotate<1, kInverse>(x, cos, sin, out, rows, table_rows, heads, half);
  }
}

// Block 256. Grid ceil(rows * ceil(heads / 4) * columns / 256), where columns = half / n for half = size / 2 and n = 16
// / sizeof(T), or columns = half if n does not divide half; any grid is right. No shared bytes.
template <typename T>
__global__ void __launch_bounds__(256)
    rotary_embedding(const T* __restrict__ x, const float* __restrict__ cos, const float* __restrict__ sin,
                     T* __restrict__ out, long long rows, long long table_rows, long long heads, long long size) {
  rotate_all<false>(x, cos, sin, out, rows, table_rows, heads, size);
}

// A thread has `n` angles, and all that they rotate: dcos and dsin are sums over heads, and over rows that share a
// table. A gradient that is not needed is null.
template <int n, typename T>
__device__ inline void rotate_backward(const T* __restrict__ x, const float* __restrict__ cos,
                                       const float* __restrict__ sin, const T* __restrict__ dout, T* __restrict__ dx,
                                       float* __restrict__ dcos, float* __restrict__ dsin, long long rows,
                                       long long table_rows, long long heads, long long half) {
  const long long columns = half / n, total = table_rows * columns, repeats = divide(rows, table_rows);
  const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += stride) {
    const long long row = divide(i, columns), column = (i - row * columns) * n, angle = row * half + column;
    const Floats<n> c = load<n>(cos + angle), s = load<n>(sin + angle);
    Floats<n> dc = {}, ds = {};
    for (long long repeat = 0; repeat < repeats; ++repeat) {
      const long long start = (repeat * table_rows + row) * heads * 2 * half + column;
#pragma unroll 4
      for (long long h = 0; h < heads; ++h) {
        const long long at = start + h * 2 * half;
        const Pair<n> of_x = load_pair<n>(x + at, half);
        Pair<n> g = load_pair<n>(dout + at, half);
#pragma unroll
        for (int e = 0; e < n; ++e) {
          const float ga = g.a.at[e], gb = g.b.at[e];
          dc.at[e] += ga * of_x.a.at[e] + gb * of_x.b.at[e];
          ds.at[e] += gb * of_x.a.at[e] - ga * of_x.b.at[e];
          g.a.at[e] = ga * c.at[e] + gb * s.at[e];
          g.b.at[e] = gb * c.at[e] - ga * s.at[e];
        }
        if (dx != nullptr) {
          store(dx + at, g.a);
          store(dx + at + half, g.b);
        }
      }
    }
    if (dcos != nullptr) store(dcos + angle, dc);
    if (dsin != nullptr) store(dsin + angle, ds);
  }
}

// `out` is not read. A gradient that is not needed is null.
//
// kTable: of the tables, or of one of them, and perhaps of x. Block 64. Grid max(1, ceil(table_rows * columns / 64)),
// columns as above; any grid is right. No shared bytes. Its time follows rows / table_rows * heads where few threads
// have much to add up.
//
// Else of x alone, which is dout rotated back: the geometry is that of forward.
template <typename T, bool kTable>
__global__ void __launch_bounds__(kTable ? 64 : 256)
    rotary_embedding_backward(const T* __restrict__ x, const float* __restrict__ cos, const float* __restrict__ sin,
                              const T* __restrict__ out, const T* __restrict__ dout, T* __restrict__ dx,
                              float* __restrict__ dcos, float* __restrict__ dsin, long long rows, long long table_rows,
                              long long heads, long long size) {
  if constexpr (kTable) {
    const long long half = size / 2;
    if (half % kPack<T> == 0 && is_aligned(x) && is_aligned(dout) && is_aligned(dx) && is_aligned(cos) &&
        is_aligned(sin) && is_aligned(dcos) && is_aligned(dsin)) {
      rotate_backward<kPack<T>>(x, cos, sin, dout, dx, dcos, dsin, rows, table_rows, heads, half);
    } else {
      rotate_backward<1>(x, cos, sin, dout, dx, dcos, dsin, rows, table_rows, heads, half);
    }
  } else {
    rotate_all<true>(dout, cos, sin, dx, rows, table_rows, heads, size);
  }
}

// Of `n` pairs for each thread.
template <int n, typename T>
__device__ inline void append_rotated(const T* __restrict__ qkv, const float* __restrict__ cos,
                                      const float* __restrict__ sin, const int* __restrict__ position,
                                      T* __restrict__ q, T* __restrict__ k_cache, T* __restrict__ v_cache,
                                      long long rows, long long table_rows, long long count, long long heads,
                                      long long kv_heads, long long half, long long length, long long positions) {
  const long long columns = half / n, all = heads + 2 * kv_heads, total = rows * all * columns;
  const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += stride) {
    const long long rest = divide(i, columns), column = (i - rest * columns) * n;
    const long long row = divide(rest, all), head = rest - row * all;
    Pair<n> pair = load_pair<n>(qkv + rest * 2 * half + column, half);
    if (head < heads + kv_heads) {
      const long long angle = (row - divide(row, table_rows) * table_rows) * half + column;
      turn<false>(pair, load<n>(cos + angle), load<n>(sin + angle));
    }
    T* to = q + (row * heads + head) * 2 * half + column;
    if (head >= heads) {
      const long long example = divide(row, count);
      const long long wanted = position[example - divide(example, positions) * positions];
      const long long first = min(max(wanted, 0ll), length - count);
      const long long place = example * length + first + row - example * count;
      const bool is_value = head >= heads + kv_heads;
      to = (is_value ? v_cache : k_cache) + (place * kv_heads + head - heads - (is_value ? kv_heads : 0)) * 2 * half +
           column;
    }
    store(to, pair.a);
    store(to + half, pair.b);
  }
}

// What stands between the projection of `count` tokens and their attention. qkv [rows, heads + 2 * kv_heads, size] of
// T: queries, keys and values, where rows = examples * count. Queries are rotated into q [rows, heads, size], keys into
// k_cache [examples, length, kv_heads, size], and values go into v_cache as they are, from position [positions] on, of
// which example e has e % positions, clamped to 0 .. length - count. The caches that are read and written are the same
// memory.
//
// Block 128. Grid ceil(rows * (heads + 2 * kv_heads) * columns / 128), columns as above; any grid is right. No shared
// bytes.
template <typename T>
__global__ void __launch_bounds__(128)
    rotary_append(const T* __restrict__ qkv, const float* __restrict__ cos, const float* __restrict__ sin,
                  const T* old_k_cache, const T* old_v_cache, const int* __restrict__ position, T* __restrict__ q,
                  T* __restrict__ k_cache, T* __restrict__ v_cache, long long rows, long long table_rows,
                  long long count, long long heads, long long kv_heads, long long size, long long length,
                  long long positions) {
  const long long half = size / 2;
  if (half % kPack<T> == 0 && is_aligned(qkv) && is_aligned(q) && is_aligned(k_cache) && is_aligned(v_cache) &&
      is_aligned(cos) && is_aligned(sin)) {
    append_rotated<kPack<T>>(qkv, cos, sin, position, q, k_cache, v_cache, rows, table_rows, count, heads, kv_heads,
                             half, length, positions);
  } else {
    append_rotated<1>(qkv, cos, sin, position, q, k_cache, v_cache, rows, table_rows, count, heads, kv_heads, half,
                      length, positions);
  }
}

}  // namespace eqxcallback
