// SwiGLU (https://arxiv.org/abs/2002.05202), silu(gate) * up, forward and backward.
//
// gate, up, out [rows, size] of T, computed in f32; or packed: gate [rows, 2 * size] with the gate first in each row,
// out [rows, size]. For the types of 16 bits, exp and the division are the fast ones: their error is far below that of
// the result, but for gates near -88, where it is below 1e-36.
//
// The geometry of all kernels: block 256, no shared bytes; any grid is right, the best is one thread for each pack of
// n = 16 / sizeof(T) elements: ceil(rows * size / n / 256), or packed with n = 1 if n does not divide size.
#include "common.cuh"

namespace eqxcallback {

template <typename T>
__device__ inline float sigmoid(float x) {
  if constexpr (sizeof(T) == 4) return 1.0f / (1.0f + expf(-x));
  return __fdividef(1.0f, 1.0f + __expf(-x));
}

// x * sigmoid(x) in one division: that of a large negative number is then not rounded twice.
template <typename T>
__device__ inline float silu(float x) {
  if constexpr (sizeof(T) == 4) return x / (1.0f + expf(-x));
  return __fdividef(x, 1.0f + __expf(-x));
}

template <int n, typename T>
__device__ inline void gated(const T* gate, const T* up, T* out) {
  const Floats<n> g = load<n>(gate), u = load<n>(up);
  Floats<n> result;
#pragma unroll
  for (int e = 0; e < n; ++e) result.at[e] = silu<T>(g.at[e]) * u.at[e];
  store(out, result);
}

template <int n, typename T>
__device__ inline void gated_backward(const T* gate, const T* up, const T* dout, T* dgate, T* dup) {
  const Floats<n> g = load<n>(gate), u = load<n>(up), d = load<n>(dout);
  Floats<n> of_gate, of_up;
#pragma unroll
  for (int e = 0; e < n; ++e) {
    const float s = sigmoid<T>(g.at[e]);
    of_gate.at[e] = d.at[e] * u.at[e] * (s + g.at[e] * s * (1.0f - s));
    of_up.at[e] = d.at[e] * silu<T>(g.at[e]);
  }
  store(dgate, of_gate);
  store(dup, of_up);
}

// body(index of a pack's first element, Count<n>()) for all packs of `count` elements, and for each element after the
// last pack. Without packs: for each element.
template <typename T, typename Body>
__device__ inline void for_each_pack(long long count, bool has_packs, Body body) {
  const long long thread = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const long long threads = static_cast<long long>(gridDim.x) * blockDim.x;
  const long long packs = has_packs ? count / kPack<T> : 0;
  for (long long i = thread; i < packs; i += threads) body(i * kPack<T>, Count<kPack<T>>());
  for (long long i = packs * kPack<T> + thread; i < count; i += threads) body(i, Count<1>());
}

template <typename T>
__global__ void __launch_bounds__(256, 4)
    swiglu(const T* __restrict__ gate, const T* __restrict__ up, T* __restrict__ out, long long rows, long long size) {
  for_each_pack<T>(rows * size, is_aligned(gate) && is_aligned(up) && is_aligned(out),
                   [&](long long i, auto pack) { gated<decltype(pack)::value>(gate + i, up + i, out + i); });
}

template <typename T>
__global__ void __launch_bounds__(256, 4)
    swiglu_packed(const T* __restrict__ gate, T* __restrict__ out, long long rows, long long size) {
  const bool has_packs = size % kPack<T> == 0 && is_aligned(gate) && is_aligned(out);
  for_each_pack<T>(rows * size, has_packs, [&](long long i, auto pack) {
    const T* from = gate + i + divide(i, size) * size;
    gated<decltype(pack)::value>(from, from + size, out + i);
  });
}

// `out` is not read.
template <typename T>
__global__ void __launch_bounds__(256, 4)
    swiglu_backward(const T* __restrict__ gate, const T* __restrict__ up, const T* __restrict__ out,
                    const T* __restrict__ dout, T* __restrict__ dgate, T* __restrict__ dup, long long rows,
                    long long size) {
  const bool has_packs = is_aligned(gate) && is_aligned(up) && is_aligned(dout) && is_aligned(dgate) && is_aligned(dup);
  for_each_pack<T>(rows * size, has_packs, [&](long long i, auto pack) {
    gated_backward<decltype(pack)::value>(gate + i, up + i, dout + i, dgate + i, dup + i);
  });
}

// dgate is packed as gate is.
template <typename T>
__global__ void __launch_bounds__(256, 4)
    swiglu_packed_backward(const T* __restrict__ gate, const T* __restrict__ out, const T* __restrict__ dout,
                           T* __restrict__ dgate, long long rows, long long size) {
  const bool has_packs = size % kPack<T> == 0 && is_aligned(gate) && is_aligned(dout) && is_aligned(dgate);
  for_each_pack<T>(rows * size, has_packs, [&](long long i, auto pack) {
    const long long at = i + divide(i, size) * size;
    gated_backward<decltype(pack)::value>(gate + at, gate + at + size, dout + i, dgate + at, dgate + at + size);
  });
}

}  // namespace eqxcallback
