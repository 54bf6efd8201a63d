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

// The factor that the scores of a tile are not yet multiplied with: what reads them does so in passing.
template <bool kOptions, class T>
float rest_of_scale(const Attention& args) {
  return !kOptions && in_pairs<T>(args.head_size) && args.scale > 0 ? args.scale * kLog2E : 1.0f;
}

// scores[j, i] = the logit of key `first` + j, whose row is the first of k, and query i, as a power of two, over
// `rest_of_scale`.
template <bool kOptions, int kVectors = Simd::kOuterVectors, class T>
void score_tile(const Attention& args, const QueryBlock& block, const float* queries, const T* k, int64_t first,
                int64_t keys, float* scores, float* widened, float* cap_derivative = nullptr) {
  const float factor = rest_of_scale<kOptions, T>(args) == 1.0f ? args.scale * kLog2E : 1.0f;
  row_products<kVectors>(scores, k, args.kv_heads * args.head_size, keys, args.head_size, queries, factor, widened);
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

// Stores the logarithms of the sums of exp(logits), from sums relative to the highest logits, which are powers of two
// over `factor`. A query without keys has -inf.
void store_lse(const Attention& args, const QueryBlock& block, const F* highest, const F* sum, int vectors,
               float factor) {
  float high[kQueryBlock], total[kQueryBlock];
  for (int v = 0; v < vectors; ++v) {
    Simd::store(high + v * kLanes, highest[v]), Simd::store(total + v * kLanes, sum[v]);
  }
  float* out = args.lse + (block.b * args.q_length + block.begin) * args.heads + block.h;
  for (int64_t i = 0; i < block.queries; ++i) {
    const double power =
        static_cast<double>(high[i]) * static_cast<double>(factor) + std::log2(static_cast<double>(total[i]));
    out[i * args.heads] = static_cast<float>(power / static_cast<double>(kLog2E));
  }
}

// A block of queries, and what attention keeps of it from one block of keys to the next.
struct Attending {
  QueryBlock block;
  float *queries, *out_t;  // [D, kQueryBlock]
  F highest[Simd::kOuterVectors], sum[Simd::kOuterVectors];
};

// The transposed values of the last block of keys, which several blocks of queries meet in turn.
struct Transposed {
  Bf16* data;  // [D, kKeyBlock]
  const Bf16* of;
  int64_t rows;

  template <class S = Simd>
  void set(const Bf16* x, int64_t stride, int64_t count, int64_t size) {
    if (x == of && count == rows) return;
    transpose_rows<S>(data, kKeyBlock, x, stride, count, size);
    of = x, rows = count;
  }
};

// The buffers of a thread for one block of queries and one block of keys.
struct AttendBuffers {
  float* scores;          // [kKeyBlock, kQueryBlock]
  float* widened;         // [kKeyBlock, D], if not f32
  float* factors;         // [kKeyBlock, kQueryBlock], with dropout
  Transposed transposed;  // in the memory of `widened`
};

template <class T>
void begin_queries(const Attention& args, Attending& to) {
  const int64_t D = args.head_size;
  const T* q = static_cast<const T*>(args.q) + query_offset(args, to.block.b, to.block.h, to.block.begin);
  arrange_queries(to.queries, q, args.heads * D, to.block.queries, D, args.scale * kLog2E);
  std::memset(to.out_t, 0, static_cast<size_t>(D * kQueryBlock) * sizeof(float));
  for (int v = 0; v < Simd::kOuterVectors; ++v) to.highest[v] = Simd::broadcast(kLowest), to.sum[v] = Simd::zero();
}

// Replaces scores by weights, split into pairs of two keys.
template <class T, int kVectors, class S = Simd, class Weigh>
void weigh_pairs(float* scores, int64_t keys, const Weigh& weigh) {
  if constexpr (kHasTiles<T>) {
    for (int64_t j = 0; j < steps_of(keys) * kTileSize; j += 2) {
      float* line = scores + j * kQueryBlock;
      for (int v = 0; v < kVectors; ++v) {
        const F first = j < keys ? weigh(line, v) : Simd::zero();
        const F second = j + 1 < keys ? weigh(line + kQueryBlock, v) : Simd::zero();
        store_split<S>(line + v * kLanes, kQueryBlock, first, second);
      }
    }
  }
}

// Adds the block of keys from `first` on to queries that fit into so many vectors.
template <class T, bool kOptions, int kVectors = Simd::kOuterVectors>
void attend_to_keys(const Attention& args, Attending& to, int64_t first, AttendBuffers& buffers) {
  const QueryBlock& block = to.block;
  const int64_t D = args.head_size, kv_stride = args.kv_heads * D;
  const int64_t keys = smaller<int64_t>(kKeyBlock, block.end - first);
  const int64_t kv_offset = key_offset(args, block.b, block.h, first);
  float* scores = buffers.scores;
  const T* k = static_cast<const T*>(args.k) + kv_offset;
  score_tile<kOptions, kVectors>(args, block, to.queries, k, first, keys, scores, buffers.widened);
  const F factor = Simd::broadcast(rest_of_scale<kOptions, T>(args));
  F highest[kVectors], sum[kVectors];
  for (int v = 0; v < kVectors; ++v) highest[v] = to.highest[v], sum[v] = to.sum[v];
  for (int64_t j = 0; j < keys; ++j) {
    for (int v = 0; v < kVectors; ++v) {
      highest[v] = Simd::max(highest[v], Simd::load(scores + j * kQueryBlock + v * kLanes));
    }
  }
  if (first > block.first) {
    F shrink[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      shrink[v] = Simd::exp2(Simd::mul(Simd::sub(to.highest[v], highest[v]), factor));
      sum[v] = Simd::mul(sum[v], shrink[v]);
    }
    for (int64_t d = 0; d < D; ++d) {
      for (int v = 0; v < kVectors; ++v) {
        float* line = to.out_t + d * kQueryBlock + v * kLanes;
        Simd::store(line, Simd::mul(Simd::load(line), shrink[v]));
      }
    }
  }
  // Sums are of exact weights, whatever they are rounded to.
  const auto weigh = [&](float* line, int v) {
    const F p = Simd::exp2(Simd::mul(Simd::sub(Simd::load(line + v * kLanes), highest[v]), factor));
    sum[v] = Simd::add(sum[v], p);
    return p;
  };
  const bool dropout = kOptions && has_dropout(args.options);
  if (in_tiles<T>(D) && !dropout) {
    weigh_pairs<T, kVectors>(scores, keys, weigh);
  } else {
    for (int64_t j = 0; j < keys; ++j) {
      float* line = scores + j * kQueryBlock;
      for (int v = 0; v < kVectors; ++v) Simd::store(line + v * kLanes, weigh(line, v));
    }
  }
  for (int v = 0; v < kVectors; ++v) to.highest[v] = highest[v], to.sum[v] = sum[v];
  if (dropout) {
    dropout_factors(*args.options, block, args.kv_length, first, keys, buffers.factors);
    for (int64_t i = 0; i < keys * kQueryBlock; i += kLanes) {
      Simd::store(scores + i, Simd::mul(Simd::load(scores + i), Simd::load(buffers.factors + i)));
    }
  }
  const T* rows_of_v = static_cast<const T*>(args.v) + kv_offset;
  if constexpr (kHasTiles<T>) {
    if (in_tiles<T>(D)) {
      buffers.transposed.set(rows_of_v, kv_stride, keys, D);
      if (dropout) split_into_pairs(scores, scores, keys, kQueryBlock);
      return tile_product<true>(to.out_t, kQueryBlock, D, {buffers.transposed.data, kKeyBlock, 0},
                                split_pairs(scores, kQueryBlock), steps_of(keys), kVectors * kLanes);
    }
  }
  const Rows v = as_floats(rows_of_v, kv_stride, keys, D, buffers.widened);
  outer_product<true, kVectors>(to.out_t, D, v.data, 1, v.stride, scores, keys);
}

template <class T>
void end_queries(const Attention& args, const Attending& from) {
  const QueryBlock& block = from.block;
  const int64_t D = args.head_size;
  T* out = static_cast<T*>(args.out) + query_offset(args, block.b, block.h, block.begin);
  store_columns(out, args.heads * D, block.queries, D, from.out_t,
                [&](int64_t i) { return inverse_or_zero(from.sum[i / kLanes]); });
  if (args.lse == nullptr) return;
  const float factor = args.options == nullptr ? rest_of_scale<false, T>(args) : rest_of_scale<true, T>(args);
  store_lse(args, block, from.highest, from.sum, static_cast<int>((block.queries + kLanes - 1) / kLanes), factor);
}

// So many blocks of queries take turns at a block of keys and its values, which are in the caches then: rows of one
// head are far apart, and a cache keeps fewer of them than it has room for. What is kept of these queries fits there
// too.
inline constexpr int64_t kMostBlocks = 4;
int64_t blocks_in_turn(int64_t head_size) {
  constexpr int64_t kFloats = 65536;  // a quarter of a second cache of 1 MiB
  const int64_t floats = 2 * larger<int64_t>(1, head_size) * kQueryBlock;
  return larger<int64_t>(1, smaller(kMostBlocks, kFloats / floats));
}

// So many blocks of queries of one head, from query `begin` on.
template <class T>
void attend(const Attention& args, int64_t b, int64_t h, int64_t begin, int64_t count, float* scratch) {
  const int64_t D = args.head_size;
  Attending all[kMostBlocks];
  for (int64_t i = 0; i < count; ++i) {
    all[i].block = query_block(args, b, h, begin + i * kQueryBlock);
    all[i].queries = scratch, all[i].out_t = scratch + D * kQueryBlock;
    scratch += 2 * D * kQueryBlock;
    begin_queries<T>(args, all[i]);
  }
  float *scores = scratch, *widened = scores + kKeyBlock * kQueryBlock;
  AttendBuffers buffers{scores, widened, widened + kKeyBlock * D, {reinterpret_cast<Bf16*>(widened), nullptr, 0}};
  [[maybe_unused]] const TilesFor<T> tiles;
  bool is_done = false;
  for (int64_t at = 0; !is_done; at += kKeyBlock) {
    is_done = true;
    for (int64_t i = 0; i < count; ++i) {
      const QueryBlock& block = all[i].block;
      if (block.first + at >= block.end) continue;
      const auto plain = block.queries <= kLanes       ? attend_to_keys<T, false, 1>
                         : block.queries <= 2 * kLanes ? attend_to_keys<T, false, 2>
                                                       : attend_to_keys<T, false>;
      const auto run = args.options == nullptr ? plain : attend_to_keys<T, true>;
      run(args, all[i], block.first + at, buffers);
      is_done = false;
    }
  }
  for (int64_t i = 0; i < count; ++i) end_queries<T>(args, all[i]);
}

void attention(Element element, const Attention& args, const Executor& executor) {
  with_type(element, [&](auto* type) {
    using T = Pointee<decltype(type)>;
    const int64_t blocks = (args.q_length + kQueryBlock - 1) / kQueryBlock, D = args.head_size;
    const double nanoseconds = keys_seen(args) * static_cast<double>(D * kQueryBlock) / (2 * kLanes) + 1000;
    const int64_t most = smaller(blocks, blocks_in_turn(D));
    const int64_t factors = has_dropout(args.options) ? kKeyBlock * kQueryBlock : 0;
    parallel_for(executor, args.batch * args.heads * blocks, nanoseconds, [&](int64_t begin, int64_t end) {
      Scratch scratch(most * 2 * D * kQueryBlock + kKeyBlock * (kQueryBlock + D) + factors);
      for (int64_t i = begin; i < end;) {
        const int64_t head = i / blocks, count = smaller(most, smaller(end, (head + 1) * blocks) - i);
        attend<T>(args, head / args.heads, head % args.heads, i % blocks * kQueryBlock, count, scratch.data());
        i += count;
      }
    });
  });
}

}  // namespace
}  // namespace eqxcallback::cpu
