// What norms share: rows that stay in registers, and their scaling.
#ifndef EQXCALLBACK_NORM_CUH
#define EQXCALLBACK_NORM_CUH

#include "../common.cuh"

namespace eqxcallback {

// Packs where all arrays allow them. One that is null does not matter.
template <typename T, typename... Others>
__device__ inline Span<T> span_of(long long size, const T* a, const Others*... others) {
  Span<T> span(size, a, a);
  const auto narrow = [&](const void* other) {
    const Span<T> both(size, a, other);
    if (other != nullptr && both.packs < span.packs) span = both;
  };
  (narrow(others), ...);
  return span;
}

// Of one row of each of kRows arrays: the same elements of all. `kept` is which of a thread's packs in registers they
// are, or -1.
template <int kRows, int n>
struct Elements {
  long long first;
  Floats<n> row[kRows];
  int kept = -1;
};

template <typename T, int kRows, int kPacks>
class Rows {
 public:
  // What `array`, of one row of f32, has beside the packs in registers.
  struct Beside {
    Floats<kPack<T>> packs[kPacks];
  };
  __device__ Beside beside(const float* array) const {
    Beside values;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const long long i = threadIdx.x + p * static_cast<long long>(blockDim.x);
      if (i < span_.packs) values.packs[p] = load_any<kPack<T>>(array + span_.pack(i));
    }
    return values;
  }

  __device__ Rows(const Span<T>& span, const T* const (&data)[kRows]) : span_(span) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) data_[r] = data[r];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const long long i = threadIdx.x + p * static_cast<long long>(blockDim.x);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (i < span.packs) kept_[p][r] = *reinterpret_cast<const uint4*>(data_[r] + span.pack(i));
      }
    }
  }

  // Adds `other`, of one row, and goes on with what is written to `sum`: the sum, rounded. That may be `other` itself.
  __device__ void add(const T* other, T* sum) {
    static_assert(kRows == 1);
    const auto total = [](auto a, const auto& b) {
#pragma unroll
      for (int e = 0; e < a.kCount; ++e) a.at[e] += b.at[e];
      return a;
    };
    uint4 added[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const long long i = threadIdx.x + p * static_cast<long long>(blockDim.x);
      if (i < span_.packs) added[p] = *reinterpret_cast<const uint4*>(other + span_.pack(i));
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const long long i = threadIdx.x + p * static_cast<long long>(blockDim.x);
      if (i >= span_.packs) continue;
      kept_[p][0] = pack<T>(total(unpack<T>(kept_[p][0]), unpack<T>(added[p])));
      __stwb(reinterpret_cast<uint4*>(sum + span_.pack(i)), kept_[p][0]);
    }
    for (long long i = threadIdx.x + kPacks * static_cast<long long>(blockDim.x); i < span_.packs; i += blockDim.x) {
      const long long at = span_.pack(i);
      store(sum + at, total(load<kPack<T>>(data_[0] + at), load<kPack<T>>(other + at)));
    }
    for (long long i = threadIdx.x; i < span_.edges; i += blockDim.x) {
      const long long at = span_.edge(i);
      store(sum + at, total(load<1>(data_[0] + at), load<1>(other + at)));
    }
    data_[0] = sum;  // each thread reads what it has written itself
  }

  // body(Elements, Count) for the share of this thread.
  template <typename Body>
  __device__ void for_each(Body body) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const long long i = threadIdx.x + p * static_cast<long long>(blockDim.x);
      if (i >= span_.packs) continue;
      Elements<kRows, kPack<T>> elements;
      elements.first = span_.pack(i);
      elements.kept = p;
#pragma unroll
      for (int r = 0; r < kRows; ++r) elements.row[r] = unpack<T>(kept_[p][r]);
      body(elements, Count<kPack<T>>());
    }
    for (long long i = threadIdx.x + kPacks * static_cast<long long>(blockDim.x); i < span_.packs; i += blockDim.x) {
      body(read<kPack<T>>(span_.pack(i)), Count<kPack<T>>());
    }
    for (long long i = threadIdx.x; i < span_.edges; i += blockDim.x) body(read<1>(span_.edge(i)), Count<1>());
  }

 private:
  template <int n>
  __device__ Elements<kRows, n> read(long long first) const {
    Elements<kRows, n> elements;
    elements.first = first;
#pragma unroll
    for (int r = 0; r < kRows; ++r) elements.row[r] = load<n>(data_[r] + first);
    return elements;
  }

  Span<T> span_;
  const T* data_[kRows];
  uint4 kept_[kPacks][kRows];
};

// Squares overflow from 2^64 on. So every sum over a row is made twice, of its elements and of these times a power of
// two, by which the squares of all rows that overflow are normal numbers.
constexpr float kShrink = 0x1p-96f;

// A row is normalized to y = (x * factor - mean) * inverse.
struct Scaling {
  float factor, mean, inverse;
};
// `squares` are the sums of both, and `means` those of the elements.
__device__ inline Scaling scaling_of(float mean, float shrunk_mean, float squares, float shrunk_squares, float length,
                                     float eps) {
  if (squares <= -kLowest) return {1.0f, mean, rsqrtf(squares / length + eps)};
  constexpr float kSmallest = 0x1p-126f;  // in place of eps, which is nothing beside them: for rows of one value
  return {kShrink, shrunk_mean, rsqrtf(shrunk_squares / length + kSmallest)};
}

// Of a row: its mean, and the sum of squares of what is left without it, of its elements and of these times kShrink.
struct Moments {
  float means[2], squares[2];
};

// Of the first array of `in`, of all threads of its row. Not centred, the means are 0.
template <bool kCenter, typename In>
__device__ inline Moments moments_of_row(const In& in, float length) {
  Moments moments = {{0.0f, 0.0f}, {0.0f, 0.0f}};
  if constexpr (kCenter) {
    in.for_each([&](const auto& elements, auto count) {
      for (const float value : elements.row[0].at) {
        moments.means[0] += value;
        moments.means[1] += value * kShrink;
      }
    });
    sum_row(moments.means);
    moments.means[0] /= length;
    moments.means[1] /= length;
  }
  in.for_each([&](const auto& elements, auto count) {
    for (const float value : elements.row[0].at) {
      const float centered = value - moments.means[0], shrunk = value * kShrink - moments.means[1];
      moments.squares[0] += centered * centered;
      moments.squares[1] += shrunk * shrunk;
    }
  });
  sum_row(moments.squares);
  return moments;
}

__device__ inline Scaling scaling_of(const Moments& moments, float length, float eps) {
  return scaling_of(moments.means[0], moments.means[1], moments.squares[0], moments.squares[1], length, eps);
}

template <bool kCenter, typename In>
__device__ inline Scaling scaling_of_row(const In& in, long long size, float eps) {
  const float length = static_cast<float>(size);
  return scaling_of(moments_of_row<kCenter>(in, length), length, eps);
}

}  // namespace eqxcallback

#endif  // EQXCALLBACK_NORM_CUH
