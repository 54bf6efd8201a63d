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
void score_tile(const Attention& args, const QueryBlock& block, const Arranged& queries, const T* k, int64_t first,
                int64_t keys, float* scores, KeyRows& rows, float* cap_derivative = nullptr) {
  const float factor = rest_of_scale<kOptions, T>(args) == 1.0f ? args.scale * kLog2E : 1.0f;
  row_products<kVectors>(scores, k, args.kv_heads * args.head_size, keys, args.head_size, queries, factor, rows);
  if constexpr (kOptions) {
    apply_options(*args.options, block, first, keys, scores, cap_derivative);
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
  Arranged queries;
  float* out_t;  // [D, kQueryBlock]
  F highest[Simd::kOuterVectors], sum[Simd::kOuterVectors];
};

// The transposed values of the last block of keys, which several blocks of queries meet in turn.
struct Transposed {
  Bf16* data;  // [D, terms, kKeyBlock]
  const void* of = nullptr;
  int64_t rows = 0;
  float highest = 0;

  // Returns the factor, which has no terms if it cannot be split.
  template <class T, class S = Simd>
  LeftRows factor(const T* x, int64_t stride, int64_t count, int64_t size) {
    const bool is_new = x != of || count != rows;
    of = x, rows = count;
    if constexpr (kIsSplit<T>) {
      if (is_new) highest = split_transposed(data, kKeyBlock, x, stride, count, size);
      return {data, 3 * kKeyBlock, kKeyBlock, has_terms(highest) ? 3 : 0};
    } else {
      if (is_new) transpose_rows<S>(data, kKeyBlock, x, stride, count, size);
      return {data, kKeyBlock, 0, 1};
    }
  }
  template <class T>
  static int64_t floats(int64_t size) {
    return kIsSplit<T> ? floats_of_terms<T>(kKeyBlock, size) : kByTiles<T> ? kKeyBlock * size / 2 : 0;
  }
};

// The buffers of a thread for one block of queries and one block of keys.
struct AttendBuffers {
  float* scores;   // [kKeyBlock, kQueryBlock]
  float* pairs;    // where weights are pairs of keys: in place of the scores, or elsewhere
  float* factors;  // [kKeyBlock, kQueryBlock], with dropout
  KeyRows keys;
  Transposed values;
};

template <class T>
void begin_queries(const Attention& args, Attending& to) {
  const int64_t D = args.head_size;
  const T* q = static_cast<const T*>(args.q) + query_offset(args, to.block.b, to.block.h, to.block.begin);
  to.queries = arrange_queries(to.queries.lines, q, args.heads * D, to.block.queries, D, args.scale * kLog2E,
                               attends_by_tiles<T>(D, args.q_length));
  std::memset(to.out_t, 0, static_cast<size_t>(D * kQueryBlock) * sizeof(float));
  for (int v = 0; v < Simd::kOuterVectors; ++v) to.highest[v] = Simd::broadcast(kLowest), to.sum[v] = Simd::zero();
}

// Weighs scores, and splits the weights into pairs of two keys.
template <class T, int kVectors, class S = Simd, class Weigh>
void weigh_pairs(const RightPairs& to, float* scores, int64_t keys, const Weigh& weigh) {
  for (int64_t j = 0; j < steps_of(keys) * kTileSize; j += 2) {
    float* line = scores + j * kQueryBlock;
    for (int v = 0; v < kVectors; ++v) {
      const F first = j < keys ? weigh(line, v) : Simd::zero();
      const F second = j + 1 < keys ? weigh(line + kQueryBlock, v) : Simd::zero();
      put_pairs<kTermsOfPairs<T>, S>(to.data + j / 2 * to.row + v * kLanes, to.further, first, second);
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
  score_tile<kOptions, kVectors>(args, block, to.queries, k, first, keys, scores, buffers.keys);
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
  const T* rows_of_v = static_cast<const T*>(args.v) + kv_offset;
  [[maybe_unused]] LeftRows values{};
  [[maybe_unused]] RightPairs pairs{};
  if constexpr (kByTiles<T>) {
    pairs = pairs_of_lines<T>(buffers.pairs, kQueryBlock);
    if (attends_by_tiles<T>(D, args.q_length)) values = buffers.values.factor(rows_of_v, kv_stride, keys, D);
  }
  const bool by_tiles = values.terms > 0;
  if constexpr (kByTiles<T>) {
    if (by_tiles && !dropout) weigh_pairs<T, kVectors>(pairs, scores, keys, weigh);
  }
  if (!by_tiles || dropout) {
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
  if constexpr (kByTiles<T>) {
    if (by_tiles) {
      if (dropout) split_into_pairs<T>(pairs, scores, keys, kQueryBlock);
      return tile_product<true>(to.out_t, kQueryBlock, D, values, pairs, steps_of(keys), kVectors * kLanes);
    }
  }
  const Rows v = as_floats(rows_of_v, kv_stride, keys, D, buffers.keys.memory);
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

// The floats that an `Attending` has, and those of an `AttendBuffers`.
template <class T>
int64_t floats_of_queries(int64_t size) {
  return 2 * size * kQueryBlock + floats_of_terms<T>(size, kQueryBlock);
}
template <class T>
int64_t floats_of_buffers(const Attention& args) {
  const int64_t tiles = has_dropout(args.options) ? 2 : 1;
  return KeyRows::floats<T>(args.head_size) + Transposed::floats<T>(args.head_size) +
         floats_of_terms<T>(kKeyBlock, kQueryBlock) + tiles * kKeyBlock * kQueryBlock;
}

// So many blocks of queries of one head, from query `begin` on.
template <class T>
void attend(const Attention& args, int64_t b, int64_t h, int64_t begin, int64_t count, float* scratch) {
  const int64_t D = args.head_size;
  Attending all[kMostBlocks];
  for (int64_t i = 0; i < count; ++i) {
    all[i].block = query_block(args, b, h, begin + i * kQueryBlock);
    all[i].out_t = scratch, all[i].queries.lines = scratch + D * kQueryBlock;
    scratch += floats_of_queries<T>(D);
    begin_queries<T>(args, all[i]);
  }
  const auto take = [&](int64_t floats) {
    float* taken = scratch;
    scratch += floats;
    return taken;
  };
  AttendBuffers buffers{};
  buffers.keys.memory = take(KeyRows::floats<T>(D));
  buffers.values.data = reinterpret_cast<Bf16*>(take(Transposed::floats<T>(D)));
  buffers.scores = take(kKeyBlock * kQueryBlock);
  buffers.pairs = kIsSplit<T> ? take(floats_of_terms<T>(kKeyBlock, kQueryBlock)) : buffers.scores;
  buffers.factors = take(has_dropout(args.options) ? kKeyBlock * kQueryBlock : 0);
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
    parallel_for(executor, args.batch * args.heads * blocks, nanoseconds, [&](int64_t begin, int64_t end) {
      Scratch scratch(most * floats_of_queries<T>(D) + floats_of_buffers<T>(args));
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
