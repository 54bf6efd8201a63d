// Gated linear units (https://arxiv.org/abs/2002.05202), activation(gate) * up, forward and backward.
//
// gate, up, out [rows, size] of T, computed in f32; or packed, where `up` is null: gate [rows, 2 * size] with the gate
// first in each row, out [rows, size]. For the types of 16 bits, exp and the division are the fast ones: their error is
// far below that of the result, but for gates near -88, where it is below 1e-36.
//
// The geometry of all kernels: block 256, no shared bytes; any grid is right, the best is one thread for each pack of
// n = 16 / sizeof(T) elements: ceil(rows * size / n / 256), or packed with n = 1 if n does not divide size.
#include "../common.cuh"

namespace eqxcallback {

// An activation has its value, and its value and slope.
struct Slope {
  float value, slope;
};

struct silu {
  template <typename T>
  __device__ static float value(float x) {
    return swish<T>(x);
  }
  template <typename T>
  __device__ static Slope with_slope(float x) {
    const float s = sigmoid<T>(x);
    return {value<T>(x), s + x * s * (1.0f - s)};
  }
};

// The number in -16 .. 16 next to x, and NaN for NaN. Beyond 16, both kinds of gelu are x or 0.
__device__ inline float clamp(float x) { return x < -16.0f ? -16.0f : x > 16.0f ? 16.0f : x; }

// The distribution function of the normal distribution, and e^(-x^2 / 2). From erfc(a) e^(a^2) / 2, which is nearly a
// polynomial in t = 1 / (1 + 0.4 a), of a = |x| / sqrt(2), as in the kernels for CPUs. Both share what they need of
// exp.
struct Normal {
  float below, density;

  template <typename T>
  __device__ static Normal at(float x) {
    constexpr float kScaled[] = {-1.479770429e-02f, 9.900937974e-02f, -2.494119257e-01f, 2.737254798e-01f,
                                 -1.421894133e-01f, 1.360361725e-01f, 6.483881921e-02f,  1.074597463e-01f,
                                 1.124759912e-01f,  1.128534526e-01f};
    const float scale = 1.0f + 0.282842712f * fabsf(x), exponent = -0.5f * x * x;
    const float t = sizeof(T) == 4 ? 1.0f / scale : __fdividef(1.0f, scale);
    const float density = sizeof(T) == 4 ? expf(exponent) : __expf(exponent);
    float sum = kScaled[0];
#pragma unroll
    for (int i = 1; i < 10; ++i) sum = sum * t + kScaled[i];
    const float tail = sum * t * density;
    return {x < 0.0f ? tail : 1.0f - tail, density};
  }
};

// x Phi(x), where Phi is the distribution function of the normal distribution.
struct gelu {
  template <typename T>
  __device__ static float value(float x) {
    return x * Normal::at<T>(clamp(x)).below;
  }
  template <typename T>
  __device__ static Slope with_slope(float x) {
    const float c = clamp(x);
    const Normal normal = Normal::at<T>(c);
    return {x * normal.below, normal.below + c * 0.398942280f * normal.density};
  }
};

// x (1 + tanh(u)) / 2 = x sigmoid(2 u), where u = sqrt(2 / pi) (x + 0.044715 x^3).
struct gelu_tanh {
  static constexpr float kLinear = 1.595769122f, kCubic = 0.0713548163f;  // of 2 u

  template <typename T>
  __device__ static float value(float x) {
    const float c = clamp(x);
    return x * sigmoid<T>(c * (kLinear + kCubic * c * c));
  }
  template <typename T>
  __device__ static Slope with_slope(float x) {
    const float c = clamp(x), s = sigmoid<T>(c * (kLinear + kCubic * c * c));
    return {x * s, s + c * s * (1.0f - s) * (kLinear + 3.0f * kCubic * c * c)};
  }
};

template <int n, typename Activation, typename T>
__device__ inline void gated(const T* gate, const T* up, T* out) {
  const Floats<n> g = load<n>(gate), u = load<n>(up);
  Floats<n> result;
#pragma unroll
  for (int e = 0; e < n; ++e) result.at[e] = Activation::template value<T>(g.at[e]) * u.at[e];
  store(out, result);
}

// Of elements from `at` on. A gradient that is not needed is null.
template <int n, typename Activation, typename T>
__device__ inline void gated_backward(const T* gate, const T* up, const T* dout, T* dgate, T* dup, long long at) {
  const Floats<n> g = load<n>(gate + at), u = load<n>(up + at), d = load<n>(dout);
  Floats<n> of_gate, of_up;
#pragma unroll
  for (int e = 0; e < n; ++e) {
    const Slope activation = Activation::template with_slope<T>(g.at[e]);
    of_gate.at[e] = d.at[e] * u.at[e] * activation.slope;
    of_up.at[e] = d.at[e] * activation.value;
  }
  if (dgate != nullptr) store(dgate + at, of_gate);
  if (dup != nullptr) store(dup + at, of_up);
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

// kPacked: `up` is null.
template <typename T, typename Activation, bool kPacked>
__global__ void __launch_bounds__(256, 4)
    glu(const T* __restrict__ gate, const T* __restrict__ up, T* __restrict__ out, long long rows, long long size) {
  const bool has_packs = is_aligned(gate) && is_aligned(up) && is_aligned(out) && !(kPacked && size % kPack<T> != 0);
  for_each_pack<T>(rows * size, has_packs, [&](long long i, auto pack) {
    constexpr int n = decltype(pack)::value;
    if constexpr (kPacked) {
      const T* from = gate + i + divide(i, size) * size;
      gated<n, Activation>(from, from + size, out + i);
    } else {
      gated<n, Activation>(gate + i, up + i, out + i);
    }
  });
}

// `out` is not read. dgate or dup is null if it is not needed. kPacked: so are `up` and dup, and dgate is packed as
// gate is.
template <typename T, typename Activation, bool kPacked>
__global__ void __launch_bounds__(256, 4)
    glu_backward(const T* __restrict__ gate, const T* __restrict__ up, const T* __restrict__ out,
                 const T* __restrict__ dout, T* __restrict__ dgate, T* __restrict__ dup, long long rows,
                 long long size) {
  const bool has_packs = is_aligned(gate) && is_aligned(up) && is_aligned(dout) && is_aligned(dgate) &&
                         is_aligned(dup) && !(kPacked && size % kPack<T> != 0);
  for_each_pack<T>(rows * size, has_packs, [&](long long i, auto pack) {
    constexpr int n = decltype(pack)::value;
    if constexpr (kPacked) {
      gated_backward<n, Activation>(gate, gate + size, dout + i, dgate, dgate + size, i + divide(i, size) * size);
    } else {
      gated_backward<n, Activation>(gate, up, dout + i, dgate, dup, i);
    }
  });
}

}  // namespace eqxcallback
