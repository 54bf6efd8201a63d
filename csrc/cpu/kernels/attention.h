// Attention of a prompt, forward: blocks of keys against blocks of queries, with the queries along the vector lanes, so
// that the softmax needs no sums across lanes. f32 throughout; bf16 keys and values are widened a block at a time.
#pragma once

#include "cpu/kernels/common.h"

namespace eqxcallback::cpu {
namespace {

inline constexpr int kKeyBlock = 128;
inline constexpr int kQueryBlock = Simd::kOuterVectors * kLanes;

// c[m, :] = sum_j a(m, j) b[j, :], or added to it: rows of kQueryBlock floats. a(m, j) = a[m * row + j * column].
template <int kRows, bool kAdd>
void outer_tile(float* c, const float* a, int64_t row, int64_t column, const float* b, int64_t n) {
  constexpr int kVectors = Simd::kOuterVectors;
  F acc[kRows][kVectors];
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      acc[m][v] = kAdd ? Simd::load(c + m * kQueryBlock + v * kLanes) : Simd::zero();
    }
  }
  for (int64_t j = 0; j < n; ++j) {
    F line[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) line[v] = Simd::load(b + j * kQueryBlock + v * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const F factor = Simd::broadcast(a[m * row + j * column]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) acc[m][v] = Simd::fma(factor, line[v], acc[m][v]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) Simd::store(c + m * kQueryBlock + v * kLanes, acc[m][v]);
  }
}

template <bool kAdd>
void outer_product(float* c, int64_t rows, const float* a, int64_t row, int64_t column, const float* b, int64_t n) {
  constexpr int kRows = Simd::kOuterRows;
  int64_t m = 0;
  for (; m + kRows <= rows; m += kRows) outer_tile<kRows, kAdd>(c + m * kQueryBlock, a + m * row, row, column, b, n);
  for (; m + 2 <= rows; m += 2) outer_tile<2, kAdd>(c + m * kQueryBlock, a + m * row, row, column, b, n);
  for (; m < rows; ++m) outer_tile<1, kAdd>(c + m * kQueryBlock, a + m * row, row, column, b, n);
}

// Rows of one head, as f32: where they are, or widened into `buffer`.
struct Rows {
  const float* data;
  int64_t stride;
};
Rows as_floats(const float* x, int64_t stride, int64_t, int64_t, float*) { return {x, stride}; }
Rows as_floats(const Bf16* x, int64_t stride, int64_t rows, int64_t size, float* buffer) {
  for (int64_t r = 0; r < rows; ++r) {
    for_vectors(size,
                [&](int64_t i, auto count) { store(buffer + r * size + i, load(x + r * stride + i, count), count); });
  }
  return {buffer, size};
}

// The queries from `begin` of one head, at most kQueryBlock of them.
template <class T>
void attend(const Attention& args, int64_t b, int64_t h, int64_t begin, float* scratch) {
  constexpr int kVectors = Simd::kOuterVectors;
  const int64_t D = args.head_size, S = args.q_length, K = args.kv_length;
  const int64_t queries = smaller<int64_t>(kQueryBlock, S - begin);
  const int64_t q_stride = args.heads * D, kv_stride = args.kv_heads * D;
  const int64_t kv_head = h / (args.heads / args.kv_heads);
  const int64_t q_offset = (b * S + begin) * q_stride + h * D;
  const int64_t kv_offset = b % args.kv_batch * K * kv_stride + kv_head * D;
  const T* q = static_cast<const T*>(args.q) + q_offset;

  float* queries_t = scratch;                         // [D, kQueryBlock]
  float* out_t = queries_t + D * kQueryBlock;         // [D, kQueryBlock]
  float* scores = out_t + D * kQueryBlock;            // [kKeyBlock, kQueryBlock]
  float* widened = scores + kKeyBlock * kQueryBlock;  // [kKeyBlock, D], for bf16

  for (int64_t d = 0; d < D; ++d) {
    for (int64_t i = 0; i < kQueryBlock; ++i) {
      queries_t[d * kQueryBlock + i] = i < queries ? to_float(q[i * q_stride + d]) * args.scale * kLog2E : 0.0f;
    }
  }
  std::memset(out_t, 0, static_cast<size_t>(D * kQueryBlock) * sizeof(float));
  F highest[kVectors], sum[kVectors];
  for (int v = 0; v < kVectors; ++v) highest[v] = Simd::broadcast(kLowest), sum[v] = Simd::zero();

  const int64_t diagonal = begin + K - S;  // the last key that the first query sees
  const int64_t end = args.causal ? smaller(K, diagonal + queries) : K;
  for (int64_t first = 0; first < end; first += kKeyBlock) {
    const int64_t keys = smaller<int64_t>(kKeyBlock, end - first);
    const Rows k =
        as_floats(static_cast<const T*>(args.k) + kv_offset + first * kv_stride, kv_stride, keys, D, widened);
    outer_product<false>(scores, keys, k.data, k.stride, 1, queries_t, D);
    if (args.causal && first + keys - 1 > diagonal) {
      for (int64_t j = larger<int64_t>(0, diagonal + 1 - first); j < keys; ++j) {
        for (int v = 0; v < kVectors; ++v) {
          float* line = scores + j * kQueryBlock + v * kLanes;
          Simd::store(line, Simd::mask_first(Simd::load(line), first + j - diagonal - v * kLanes));
        }
      }
    }
    F previous[kVectors];
    for (int v = 0; v < kVectors; ++v) previous[v] = highest[v];
    for (int64_t j = 0; j < keys; ++j) {
      for (int v = 0; v < kVectors; ++v) {
        highest[v] = Simd::max(highest[v], Simd::load(scores + j * kQueryBlock + v * kLanes));
      }
    }
    if (first > 0) {
      F shrink[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        shrink[v] = Simd::exp2(Simd::sub(previous[v], highest[v]));
        sum[v] = Simd::mul(sum[v], shrink[v]);
      }
      for (int64_t d = 0; d < D; ++d) {
        for (int v = 0; v < kVectors; ++v) {
          float* line = out_t + d * kQueryBlock + v * kLanes;
          Simd::store(line, Simd::mul(Simd::load(line), shrink[v]));
        }
      }
    }
    for (int64_t j = 0; j < keys; ++j) {
      for (int v = 0; v < kVectors; ++v) {
        float* line = scores + j * kQueryBlock + v * kLanes;
        const F p = Simd::exp2(Simd::sub(Simd::load(line), highest[v]));
        sum[v] = Simd::add(sum[v], p);
        Simd::store(line, p);
      }
    }
    const Rows v =
        as_floats(static_cast<const T*>(args.v) + kv_offset + first * kv_stride, kv_stride, keys, D, widened);
    outer_product<true>(out_t, D, v.data, 1, v.stride, scores, keys);
  }

  float total[kQueryBlock];
  for (int v = 0; v < kVectors; ++v) Simd::store(total + v * kLanes, sum[v]);
  T* out = static_cast<T*>(args.out) + q_offset;
  for (int64_t i = 0; i < queries; ++i) {
    const float inverse = total[i] == 0.0f ? 0.0f : 1.0f / total[i];  // a query without keys gives zeros
    for (int64_t d = 0; d < D; ++d) from_float(out_t[d * kQueryBlock + i] * inverse, out[i * q_stride + d]);
  }
}

void attention(Element element, const Attention& args, const Executor& executor) {
  with_type(element, [&](auto* type) {
    using T = Pointee<decltype(type)>;
    const int64_t blocks = (args.q_length + kQueryBlock - 1) / kQueryBlock;
    const double keys = static_cast<double>(args.kv_length) / (args.causal ? 2 : 1);
    const double nanoseconds = keys * static_cast<double>(args.head_size * kQueryBlock) / (2 * kLanes) + 1000;
    parallel_for(executor, args.batch * args.heads * blocks, nanoseconds, [&](int64_t begin, int64_t end) {
      Scratch scratch(2 * args.head_size * kQueryBlock + kKeyBlock * (kQueryBlock + args.head_size));
      for (int64_t i = begin; i < end; ++i) {
        attend<T>(args, i / blocks / args.heads, i / blocks % args.heads, i % blocks * kQueryBlock, scratch.data());
      }
    });
  });
}

}  // namespace
}  // namespace eqxcallback::cpu
