// Rows of x that are quantised to int8 times rows of int8, by the products of bytes of AVX-512 VNNI. The sums of a lane
// are exact integers.
#pragma once

#include "cpu/kernels/dots.h"
#include "cpu/kernels/linear_activations.h"

namespace eqxcallback::cpu {
namespace {

inline constexpr int64_t kBytes = 64;  // in a vector

// VNNI multiplies bytes without a sign by signed ones: weights are 128 too high.
__m512i without_sign(__m512i bytes) { return _mm512_xor_si512(bytes, _mm512_set1_epi8(static_cast<char>(0x80))); }

// Rows as integers, with zeros up to a whole number of vectors.
class ByteRows {
 public:
  ByteRows(int64_t num_rows, int64_t size)
      : padded_((size + kBytes - 1) / kBytes * kBytes), scratch_(num_rows * (padded_ / 4 + kLanes + 1) + 1) {
    offsets_ = reinterpret_cast<int32_t*>(scratch_.data());
    integers_ = reinterpret_cast<int8_t*>(offsets_ + num_rows * kLanes);
    scales_ = reinterpret_cast<float*>(integers_ + num_rows * padded_);
  }

  const int8_t* integers(int64_t r) const { return integers_ + r * padded_; }
  int64_t stride() const { return padded_; }
  // -128 times the sums of the integers, as they meet the lanes of a product.
  __m512i offset(int64_t r) const { return _mm512_load_si512(offsets_ + r * kLanes); }
  float scale(int64_t r) const { return scales_[r]; }

  // False if x is not finite.
  bool set(int64_t r, const float* x, int64_t size) {
    Steps steps;
    if (!steps_of(steps, x, size)) return false;
    int8_t* out = integers_ + r * padded_;
    if (padded_ > 0) std::memset(out + padded_ - kBytes, 0, kBytes);
    const F inverse = Simd::broadcast(steps.inverse);
    for_vectors(size, [&](int64_t i, auto count) {
      const __m512i n = _mm512_cvtps_epi32(Simd::mul(load(x + i, count), inverse));
      _mm_store_si128(reinterpret_cast<__m128i*>(out + i), _mm512_cvtepi32_epi8(n));
    });
    const __m512i zero = _mm512_setzero_si512();
    __m512i sum = zero;
    for (int64_t i = 0; i < padded_; i += kBytes) {
      sum = _mm512_dpbusd_epi32(sum, without_sign(zero), _mm512_load_si512(out + i));
    }
    _mm512_store_si512(offsets_ + r * kLanes, _mm512_sub_epi32(zero, sum));
    scales_[r] = steps.scale;
    return true;
  }

 private:
  int64_t padded_;
  Scratch scratch_;
  int32_t* offsets_;
  int8_t* integers_;
  float* scales_;
};

// out[r * kWeights + w]: the sum of products of row `first` + r of x and rows[w]. Never inlined, as `dots`.
template <int kRows, int kWeights>
[[gnu::noinline]] void byte_sums(float* out, const ByteRows& x, int64_t first, const int8_t* const* rows,
                                 int64_t size) {
  __m512i acc[kRows][kWeights];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int w = 0; w < kWeights; ++w) acc[r][w] = x.offset(first + r);
  }
  const int8_t* integers = x.integers(first);
  const int64_t stride = x.stride();
  const auto step = [&](int64_t i, const auto& load_weights) __attribute__((always_inline)) {
    __m512i weights[kWeights];
#pragma GCC unroll 8
    for (int w = 0; w < kWeights; ++w) {
      weights[w] = without_sign(load_weights(rows[w] + i));
      if constexpr (kRows == 1) prefetch_stream(rows[w] + i);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m512i v = _mm512_load_si512(integers + r * stride + i);
#pragma GCC unroll 8
      for (int w = 0; w < kWeights; ++w) acc[r][w] = _mm512_dpbusd_epi32(acc[r][w], weights[w], v);
    }
  };
  int64_t i = 0;
  for (; i + kBytes <= size; i += kBytes) step(i, [](const int8_t* p) { return _mm512_loadu_si512(p); });
  if (i < size) {
    const __mmask64 mask = (__mmask64{1} << (size - i)) - 1;
    step(i, [&](const int8_t* p) { return _mm512_maskz_loadu_epi8(mask, p); });
  }
  F sums[kLanes] = {};
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int w = 0; w < kWeights; ++w) sums[r * kWeights + w] = _mm512_cvtepi32_ps(acc[r][w]);
  }
  Simd::store(out, Simd::sums(sums));
}

// put(r, o, sum) for all rows.
template <class Put>
void multiply_few(const ByteRows& bytes, int64_t num_rows, const int8_t* weights, int64_t num_weights, int64_t size,
                  const Executor& executor, const Put& put) {
  // So many rows of x at a time that they stay in the second cache.
  const int64_t step = larger<int64_t>(4, (int64_t{1} << 18) / larger<int64_t>(1, size));
  const double nanoseconds = static_cast<double>(size) * (0.04 + 0.006 * static_cast<double>(num_rows)) + 5;
  parallel_for(
      executor, num_weights, nanoseconds,
      [&](int64_t begin, int64_t end) {
        for (int64_t first = 0; first < num_rows; first += step) {
          const auto tile = [&](auto num_x, auto num_w, int64_t r, int64_t o, int64_t part) {
            constexpr int kRows = decltype(num_x)::value, kWeights = decltype(num_w)::value;
            const int8_t* rows[kWeights];
            for (int w = 0; w < kWeights; ++w) rows[w] = weights + (o + w * part) * size;
            float sums[kLanes];
            byte_sums<kRows, kWeights>(sums, bytes, first + r, rows, size);
            for (int i = 0; i < kRows; ++i) {
              for (int w = 0; w < kWeights; ++w) {
                put(first + r + i, o + w * part, bytes.scale(first + r + i) * sums[i * kWeights + w]);
              }
            }
          };
          for_tiles<4, 4>(smaller(step, num_rows - first), begin, end, tile);
        }
      },
      8);
}

}  // namespace
}  // namespace eqxcallback::cpu
