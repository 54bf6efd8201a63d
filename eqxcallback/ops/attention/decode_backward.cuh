// What the kernels of decode_backward.cu share: what a lane has of a row, scores, and the sums of a part of the keys.
#ifndef EQXCALLBACK_DECODE_BACKWARD_CUH
#define EQXCALLBACK_DECODE_BACKWARD_CUH

#include "decode.cuh"

namespace eqxcallback {

// What the first launch keeps of a part, and the second one of a row. With slopes there are sums for their gradients.
template <bool kSloped>
constexpr int kOfPart = kSloped ? 5 : 3;
template <bool kSloped>
constexpr int kOfRow = kSloped ? 4 : 3;

// Of a row of the cache.
template <typename C, int n>
__device__ inline Floats<n> own_columns(const uint4 (&bits)[n / kPack<C>]) {
  Floats<n> values;
#pragma unroll
  for (int p = 0; p < n / kPack<C>; ++p) {
    const Floats<kPack<C>> part = elements_of<C>(bits[p]);
#pragma unroll
    for (int e = 0; e < kPack<C>; ++e) values.at[p * kPack<C> + e] = part.at[e];
  }
  return values;
}

// Of a row of q or dout, in the columns that the lane has of the cache. Times a factor.
template <typename T, typename C, int n, bool kPacked>
__device__ inline Floats<n> own_columns(const Columns<C, n, kPacked>& columns, const T* row, long long size,
                                        float factor) {
  Floats<n> values;
  if constexpr (sizeof(C) == sizeof(T)) {
    uint4 bits[n / kPack<C>];
    columns.read(row, bits);
    values = own_columns<C, n>(bits);
  } else {  // a cache in int8
#pragma unroll
    for (int p = 0; p < n / kPack<C>; ++p) {
      const long long first = columns.column(p);
      Floats<kPack<C>> part = {};
      if constexpr (kPacked) {
        if (first < size) part = load<kPack<C>>(row + first);
      } else {
#pragma unroll
        for (int e = 0; e < kPack<C>; ++e) part.at[e] = first + e < size ? to_float(row[first + e]) : 0.0f;
      }
#pragma unroll
      for (int e = 0; e < kPack<C>; ++e) values.at[p * kPack<C> + e] = part.at[e];
    }
  }
#pragma unroll
  for (int c = 0; c < n; ++c) values.at[c] *= factor;
  return values;
}

template <int n>
__device__ inline float dot(const Floats<n>& a, const Floats<n>& b) {
  float sum = 0.0f;
#pragma unroll
  for (int c = 0; c < n; ++c) sum += a.at[c] * b.at[c];
  return sum;
}

// Lanes that have one row, a power of two.
template <int n>
__device__ inline unsigned lanes_of_row(long long size) {
  unsigned lanes = 1;
  while (static_cast<long long>(lanes) * n < size) lanes *= 2;
  return lanes;
}

// A score, and its derivative by what it was before the cap.
template <bool kCapped>
struct Score {
  float value, slope;
  __device__ Score(float raw, float soft_cap) : value(raw), slope(1.0f) {
    if constexpr (kCapped) {
      if (soft_cap > 0) {
        value = capped(raw, soft_cap);
        const float share = value / (soft_cap * kLog2E);
        slope = 1.0f - share * share;
      }
    }
  }
};

// Some keys for one query head. With slopes the first two sums are there again, of what is multiplied by the distance
// of the key.
template <int n, bool kSloped>
struct Sums {
  float highest = kLowest, sum = 0.0f, product = 0.0f, far_product = 0.0f, far_sum = 0.0f;
  float of_products[n] = {}, of_keys[n] = {};

  // As if they had seen that highest score.
  __device__ void rescale(float next) {
    const float factor = exp2f(highest - next);
    highest = next;
    sum *= factor;
    product *= factor;
    if constexpr (kSloped) {
      far_product *= factor;
      far_sum *= factor;
    }
#pragma unroll
    for (int c = 0; c < n; ++c) {
      of_products[c] *= factor;
      of_keys[c] *= factor;
    }
  }
};

}  // namespace eqxcallback

#endif  // EQXCALLBACK_DECODE_BACKWARD_CUH
