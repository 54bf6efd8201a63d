// Attention of a prompt, forward: blocks of keys against blocks of queries, with the queries along the vector lanes, so
// that the softmax needs no sums across lanes. Keys and values of 16 bits are widened a block at a time, but where the
// processor multiplies pairs of bf16, with the same products.
#pragma once

#include <cmath>

#include "cpu/kernels/attention_options.h"

namespace eqxcallback::cpu {
namespace {

// Returns where the rows of a head begin, in elements.
int64_t query_offset(const Attention& args, int64_t b, int64_t h, int64_t row) {
  return ((b * args.q_length + row) * args.heads + h) * args.head_size;
}
int64_t key_offset(const Attention& args, int64_t b, int64_t h, int64_t row) {
  const int64_t kv_head = h / (args.heads / args.kv_heads);
  return ((b % args.kv_batch * args.kv_length + row) * args.kv_heads + kv_head) * args.head_size;
}

// Estimates how many keys the queries see.
double keys_seen(const Attention& args) {
  const double keys = static_cast<double>(args.kv_length) / (args.causal ? 2 : 1);
  if (args.options == nullptr || args.options->window == 0) return keys;
  return smaller(keys, static_cast<double>(args.options->window) * (args.causal ? 1 : 2) + kKeyBlock);
}

// scores[j, i] = the logit of key `first` + j, whose row is the first of k, and query i, as a power of two.
template <bool kOptions, int kVectors = Simd::kOuterVectors, class T>
void score_tile(const Attention& args, const QueryBlock& block, const float* queries, const T* k, int64_t first,
                int64_t keys, float* scores, float* widened, float* cap_derivative = nullptr) {
  row_products<kVectors>(scores, k, args.kv_heads * args.head_size, keys, args.head_size, queries, args.scale * kLog2E,
                         widened);
  if constexpr (kOptions) {
    apply_options(*args.options, block, args.kv_length, first, keys, scores, cap_derivative);
    mask_places(block, first, keys, scores);
  } else if (args.causal && first + keys - 1 > block.position) {
    for (int64_t j = larger<int64_t>(0, block.position + 1 - first); j < keys; ++j) {
      for (int v = 0; v < kVectors; ++v) {
        float* line = scores + j * kQueryBlock + v * kLanes;
        Simd::store(line, Simd::mask_first(Simd::load(line), first + j - block.position - v * kLanes));
      }
    }
  }
}

// Inverts sums of weights. A query without keys has zero, which is also its result.
F inverse_or_zero(F sum) { return Simd::select_less(Simd::zero(), sum, Simd::div(Simd::broadcast(1.0f), sum), sum); }

// Stores the logarithms of the sums of exp(logits), from sums relative to the highest logits, which are powers of two.
// A query without keys has -inf.
void store_lse(const Attention& args, const QueryBlock& block, const F* highest, const F* sum, int vectors) {
  float high[kQueryBlock], total[kQueryBlock];
  for (int v = 0; v < vectors; ++v) {
    Simd::store(high + v * kLanes, highest[v]), Simd::store(total + v * kLanes, sum[v]);
  }
  float* out = args.lse + (block.b * args.q_length + block.begin) * args.heads + block.h;
  for (int64_t i = 0; i < block.queries; ++i) {
    const double power = static_cast<double>(high[i]) + std::log2(static_cast<double>(total[i]));
    out[i * args.heads] = static_cast<float>(power / static_cast<double>(kLog2E));
  }
}

// The queries from `begin` of one head, at most kQueryBlock of them, which fit into so many vectors.
template <class T, bool kOptions, int kVectors = Simd::kOuterVectors>
void attend(const Attention& args, int64_t b, int64_t h, int64_t begin, float* scratch) {
  const int64_t D = args.head_size;
  const int64_t q_stride = args.heads * D, kv_stride = args.kv_heads * D;
  const QueryBlock block = query_block(args, b, h, begin);
  const int64_t q_offset = query_offset(args, b, h, begin);

  float* queries = scratch;                           // [D, kQueryBlock]
  float* out_t = queries + D * kQueryBlock;           // [D, kQueryBlock]
  float* scores = out_t + D * kQueryBlock;            // [kKeyBlock, kQueryBlock]
  float* widened = scores + kKeyBlock * kQueryBlock;  // [kKeyBlock, D], if not f32
  float* factors = widened + kKeyBlock * D;           // [kKeyBlock, kQueryBlock], with dropout

  arrange_queries(queries, static_cast<const T*>(args.q) + q_offset, q_stride, block.queries, D, args.scale * kLog2E);
  std::memset(out_t, 0, static_cast<size_t>(D * kQueryBlock) * sizeof(float));
  F highest[kVectors], sum[kVectors];
  for (int v = 0; v < kVectors; ++v) highest[v] = Simd::broadcast(kLowest), sum[v] = Simd::zero();

  for (int64_t first = block.first; first < block.end; first += kKeyBlock) {
    const int64_t keys = smaller<int64_t>(kKeyBlock, block.end - first);
    const int64_t kv_offset = key_offset(args, b, h, first);
    const T* k = static_cast<const T*>(args.k) + kv_offset;
    score_tile<kOptions, kVectors>(args, block, queries, k, first, keys, scores, widened);
    F previous[kVectors];
    for (int v = 0; v < kVectors; ++v) previous[v] = highest[v];
    for (int64_t j = 0; j < keys; ++j) {
      for (int v = 0; v < kVectors; ++v) {
        highest[v] = Simd::max(highest[v], Simd::load(scores + j * kQueryBlock + v * kLanes));
      }
    }
    if (first > block.first) {
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
    if constexpr (kOptions) {
      if (has_dropout(args.options)) {
        dropout_factors(*args.options, block, args.kv_length, first, keys, factors);
        for (int64_t i = 0; i < keys * kQueryBlock; i += kLanes) {
          Simd::store(scores + i, Simd::mul(Simd::load(scores + i), Simd::load(factors + i)));
        }
      }
    }
    const Rows v = as_floats(static_cast<const T*>(args.v) + kv_offset, kv_stride, keys, D, widened);
    outer_product<true, kVectors>(out_t, D, v.data, 1, v.stride, scores, keys);
  }

  store_columns(static_cast<T*>(args.out) + q_offset, q_stride, block.queries, D, out_t,
                [&](int64_t i) { return inverse_or_zero(sum[i / kLanes]); });
  if (args.lse != nullptr) store_lse(args, block, highest, sum, kVectors);
}

void attention(Element element, const Attention& args, const Executor& executor) {
  with_type(element, [&](auto* type) {
    using T = Pointee<decltype(type)>;
    const int64_t blocks = (args.q_length + kQueryBlock - 1) / kQueryBlock, D = args.head_size;
    const double nanoseconds = keys_seen(args) * static_cast<double>(D * kQueryBlock) / (2 * kLanes) + 1000;
    const int64_t factors = has_dropout(args.options) ? kKeyBlock * kQueryBlock : 0;
    parallel_for(executor, args.batch * args.heads * blocks, nanoseconds, [&](int64_t begin, int64_t end) {
      Scratch scratch(2 * D * kQueryBlock + kKeyBlock * (kQueryBlock + D) + factors);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t queries = args.q_length - i % blocks * kQueryBlock;
        const auto plain = queries <= kLanes       ? attend<T, false, 1>
                           : queries <= 2 * kLanes ? attend<T, false, 2>
                                                   : attend<T, false>;
        const auto run = args.options == nullptr ? plain : attend<T, true>;
        run(args, i / blocks / args.heads, i / blocks % args.heads, i % blocks * kQueryBlock, scratch.data());
      }
    });
  });
}

}  // namespace
}  // namespace eqxcallback::cpu
