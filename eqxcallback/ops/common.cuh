// What the kernels share: elements as f32, accesses of 16 bytes to rows of any size and alignment, sums over a row,
// and over blocks.
#ifndef EQXCALLBACK_COMMON_CUH
#define EQXCALLBACK_COMMON_CUH

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
// Shared memory of the size that the launch says. The header that runs these files on a CPU has its own.
#define DYN_SHARED(T, name)             \
  extern __shared__ uint4 dyn_shared[]; \
  T* const name = reinterpret_cast<T*>(dyn_shared)
#endif

namespace eqxcallback {

constexpr unsigned kAllLanes = 0xffffffffu;
// Where a maximum starts. Finite: a difference with it is not a NaN, and exp() of that is 0.
constexpr float kLowest = -3.402823466e+38f;

// -- elements

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__device__ T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
  return value;
}
template <>
__device__ inline __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

__device__ inline float nan_value() { return __int_as_float(0x7fffffff); }

// For the types of 16 bits, exp and the division are the fast ones: their error is far below that of the result.
template <typename T>
__device__ inline float sigmoid(float x) {
  if constexpr (sizeof(T) == 4) return 1.0f / (1.0f + expf(-x));
  return __fdividef(1.0f, 1.0f + __expf(-x));
}
// x sigmoid(x), in one division: that of a large negative number is then not rounded twice.
template <typename T>
__device__ inline float swish(float x) {
  if constexpr (sizeof(T) == 4) return x / (1.0f + expf(-x));
  return __fdividef(x, 1.0f + __expf(-x));
}

// Of numbers >= 0: 64-bit divisions are slow, and sizes are rarely that large.
__device__ inline long long divide(long long a, long long b) {
  if (((a | b) >> 32) == 0) return static_cast<unsigned>(a) / static_cast<unsigned>(b);
  return a / b;
}

// -- packs: the elements of an access of 16 bytes

template <int n>
struct Floats {
  static constexpr int kCount = n;
  float at[n];
};

template <typename T>
constexpr int kPack = 16 / static_cast<int>(sizeof(T));

__device__ inline bool is_aligned(const void* address) {
  return reinterpret_cast<unsigned long long>(address) % 16 == 0;
}

// Two elements of 16 bits in a word. Said in words, because of elements one by one the compiler makes small accesses.
__device__ inline float2 unpack_pair(unsigned bits, __half) {
  __half2 pair;
  memcpy(static_cast<void*>(&pair), &bits, sizeof(bits));
  return __half22float2(pair);
}
__device__ inline float2 unpack_pair(unsigned bits, __nv_bfloat16) {
  return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}
__device__ inline unsigned pack_pair(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  unsigned bits;
  memcpy(&bits, static_cast<const void*>(&pair), sizeof(bits));
  return bits;
}
__device__ inline unsigned pack_pair(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  unsigned bits;
  memcpy(&bits, static_cast<const void*>(&pair), sizeof(bits));
  return bits;
}

// Four signed bytes ^ kTurnSigns are 128 + each, from 0 on. Of two of them, the bytes as bf16, which has them exactly.
constexpr unsigned kTurnSigns = 0x80808080u;
template <unsigned first, unsigned second>
__device__ inline unsigned bf16_of_bytes(unsigned turned) {
  // 2^23 + 128 + byte; as f32 the byte ends in zeros.
  const float low = __uint_as_float(__byte_perm(turned, 0x4b000000u, 0x7440u | first)) - 8388736.0f;
  const float high = __uint_as_float(__byte_perm(turned, 0x4b000000u, 0x7440u | second)) - 8388736.0f;
  return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632u);
}

template <typename T>
__device__ inline Floats<kPack<T>> unpack(uint4 bits) {
  if constexpr (sizeof(T) == 4) {
    return {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), __uint_as_float(bits.w)};
  } else {
    const float2 a = unpack_pair(bits.x, T()), b = unpack_pair(bits.y, T());
    const float2 c = unpack_pair(bits.z, T()), d = unpack_pair(bits.w, T());
    return {a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y};
  }
}

template <typename T>
__device__ inline uint4 pack(const Floats<kPack<T>>& values) {
  const auto& v = values.at;
  if constexpr (sizeof(T) == 4) {
    return make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
  } else {
    return make_uint4(pack_pair(v[0], v[1], T()), pack_pair(v[2], v[3], T()), pack_pair(v[4], v[5], T()),
                      pack_pair(v[6], v[7], T()));
  }
}

// One element, or one or more packs at an aligned address.
template <int n, typename T>
__device__ inline Floats<n> load(const T* from) {
  Floats<n> values;
  if constexpr (n == 1) {
    values.at[0] = to_float(*from);
  } else {
#pragma unroll
    for (int first = 0; first < n; first += kPack<T>) {
      const Floats<kPack<T>> part = unpack<T>(*reinterpret_cast<const uint4*>(from + first));
#pragma unroll
      for (int e = 0; e < kPack<T>; ++e) values.at[first + e] = part.at[e];
    }
  }
  return values;
}

// To device memory, not to shared: an intrinsic, because an assignment becomes four stores in unrolled code.
template <int n, typename T>
__device__ inline void store(T* to, const Floats<n>& values) {
  if constexpr (n == 1) {
    *to = from_float<T>(values.at[0]);
  } else {
#pragma unroll
    for (int first = 0; first < n; first += kPack<T>) {
      Floats<kPack<T>> part;
#pragma unroll
      for (int e = 0; e < kPack<T>; ++e) part.at[e] = values.at[first + e];
      __stwb(reinterpret_cast<uint4*>(to + first), pack<T>(part));
    }
  }
}

// f32 at any address: those of weights need not be aligned where those of their row are.
template <int n>
__device__ inline Floats<n> load_any(const float* from) {
  if (n > 1 && is_aligned(from)) return load<n>(from);
  Floats<n> values;
#pragma unroll
  for (int e = 0; e < n; ++e) values.at[e] = from[e];
  return values;
}

template <int n>
__device__ inline void store_any(float* to, const Floats<n>& values) {
  if (n > 1 && is_aligned(to)) {
    store(to, values);
    return;
  }
#pragma unroll
  for (int e = 0; e < n; ++e) to[e] = values.at[e];
}

// In memory of any kind.
template <int n>
__device__ inline void add_any(float* to, const Floats<n>& values) {
  const Floats<n> sums = load_any<n>(to);
  if constexpr (n > 1) {
    if (is_aligned(to)) {
#pragma unroll
      for (int e = 0; e < n; e += 4) {
        *reinterpret_cast<float4*>(to + e) =
            make_float4(sums.at[e] + values.at[e], sums.at[e + 1] + values.at[e + 1], sums.at[e + 2] + values.at[e + 2],
                        sums.at[e + 3] + values.at[e + 3]);
      }
      return;
    }
  }
#pragma unroll
  for (int e = 0; e < n; ++e) to[e] = sums.at[e] + values.at[e];
}

// -- rows

// A row as packs at aligned addresses, and edges: the single elements before and after them. All of them are edges if
// the two arrays, of which it is a row, do not allow packs of the same elements.
template <typename T>
struct Span {
  long long head, packs, edges;

  __device__ Span(long long size, const T* a, const void* b) {
    const unsigned misaligned = reinterpret_cast<unsigned long long>(a) % 16;
    head = (16 - misaligned) % 16 / sizeof(T);
    const bool fits = head < size && misaligned == reinterpret_cast<unsigned long long>(b) % 16;
    if (!fits) head = size;
    packs = (size - head) / kPack<T>;
    edges = size - packs * kPack<T>;
  }
  // The first element of a pack, and the element of an edge.
  __device__ long long pack(long long i) const { return head + i * kPack<T>; }
  __device__ long long edge(long long i) const { return i < head ? i : i + packs * kPack<T>; }
};

// To tell a generic lambda how many elements it gets.
template <int n>
struct Count {
  static constexpr int value = n;
};

// body(first element, Floats<n>, Count<n>()) for each pack and each edge of a row, of which the threads of a row
// (threadIdx.x) have their share. kAhead packs are on their way at a time.
template <int kAhead = 4, typename T, typename Body>
__device__ inline void for_each(const Span<T>& span, const T* row, Body body) {
  const long long threads = blockDim.x;
  for (long long i = threadIdx.x; i < span.packs; i += kAhead * threads) {
    uint4 bits[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const long long own = i + a * threads;
      if (own < span.packs) bits[a] = *reinterpret_cast<const uint4*>(row + span.pack(own));
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const long long own = i + a * threads;
      if (own < span.packs) body(span.pack(own), unpack<T>(bits[a]), Count<kPack<T>>());
    }
  }
  for (long long i = threadIdx.x; i < span.edges; i += threads) {
    body(span.edge(i), load<1>(row + span.edge(i)), Count<1>());
  }
}

// -- what the threads of a row (threadIdx.x) reduce. blockDim.x is a multiple of 32, and the block has at most 1024
// threads. All threads of the block call it. What they have written before, those of the same row see afterwards.

struct Add {
  static constexpr float kStart = 0.0f;
  __device__ static float of(float a, float b) { return a + b; }
};
// Of numbers: a NaN is left out.
struct Max {
  static constexpr float kStart = kLowest;
  __device__ static float of(float a, float b) { return fmaxf(a, b); }
};

template <typename Operation>
__device__ inline float reduce_warp(float value) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value = Operation::of(value, __shfl_xor_sync(kAllLanes, value, lanes));
  return value;
}

template <typename Operation, int n>
__device__ inline void reduce_row(float (&values)[n]) {
  __shared__ float of_warps[n][32];
#pragma unroll
  for (int i = 0; i < n; ++i) values[i] = reduce_warp<Operation>(values[i]);
  if (blockDim.x == 32) {
    __syncwarp();
    return;
  }
  const unsigned warps = blockDim.x / 32, lane = threadIdx.x % 32, first = threadIdx.y * warps;
  __syncthreads();  // all have read those of the last time
#pragma unroll
  for (int i = 0; i < n; ++i) {
    if (lane == 0) of_warps[i][first + threadIdx.x / 32] = values[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < n; ++i) {
    values[i] = reduce_warp<Operation>(lane < warps ? of_warps[i][first + lane] : Operation::kStart);
  }
}

template <int n>
__device__ inline void sum_row(float (&values)[n]) {
  reduce_row<Add>(values);
}

// -- what several blocks have

// result[i] = the sum over all parts of parts[i]. Of a block (32, 8), 32 elements.
__device__ inline void sum_parts(const float* parts, float* result, long long stride, long long size, long long count) {
  __shared__ float sums[8][32];
  const long long i = static_cast<long long>(blockIdx.x) * 32 + threadIdx.x;
  float sum = 0.0f;
  if (i < size) {
#pragma unroll 4
    for (long long part = threadIdx.y; part < count; part += 8) sum += parts[part * stride + i];
  }
  __syncthreads();  // this is called twice
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && i < size) {
    for (int y = 1; y < 8; ++y) sum += sums[y][threadIdx.x];
    result[i] = sum;
  }
}

}  // namespace eqxcallback

#endif  // EQXCALLBACK_COMMON_CUH
