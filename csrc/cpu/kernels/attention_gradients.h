// The gradients of attention for a block of queries and a block of keys, as FlashAttention-2 computes them
// (https://arxiv.org/abs/2307.08691): weights come again from the logits, the highest of them and the sum of their
// exponentials.
#pragma once

#include "cpu/kernels/attention.h"

namespace eqxcallback::cpu {
namespace {

// Rows of `size` floats are as long as a number of vectors here, with zeros at the end.
int64_t padded(int64_t size) { return (size + kLanes - 1) / kLanes * kLanes; }

// Up to so many keys, the logits of a block of queries are kept instead of computed twice.
inline constexpr int64_t kKeptKeys = 4096;

// The buffers of a thread for one block of queries and one block of keys.
struct TileBuffers {
  int64_t size, width;
  float *queries_t, *cotangents_t;   // [D, kQueryBlock], the queries scaled to powers of two
  float *queries, *cotangents;       // [kQueryBlock, width], or half as many rows of pairs
  float *highest, *inverse, *delta;  // [kQueryBlock]
  float* dq_t;                       // [D, kQueryBlock]
  float *weights, *dlogits;          // [kKeyBlock, kQueryBlock]
  float *factors, *derivative;       // of the same shape: factors of dropout, and the derivative of the soft cap
  float *k, *v;                      // [kKeyBlock, D], if not f32; or v is [kKeyBlock, kQueryBlock]

  static int64_t floats(const Attention& args) {
    const int64_t tiles = args.options == nullptr ? 2 : 4;
    return kQueryBlock * (3 * args.head_size + 2 * padded(args.head_size) + 3 + tiles * kKeyBlock) +
           kKeyBlock * (args.head_size + larger<int64_t>(args.head_size, kQueryBlock));
  }
  TileBuffers(const Attention& args, float* memory) : size(args.head_size), width(padded(size)) {
    const auto take = [&](int64_t count) {
      float* taken = memory;
      memory += count;
      return taken;
    };
    queries_t = take(size * kQueryBlock), cotangents_t = take(size * kQueryBlock), dq_t = take(size * kQueryBlock);
    queries = take(width * kQueryBlock), cotangents = take(width * kQueryBlock);
    highest = take(kQueryBlock), inverse = take(kQueryBlock), delta = take(kQueryBlock);
    weights = take(kKeyBlock * kQueryBlock), dlogits = take(kKeyBlock * kQueryBlock);
    k = take(kKeyBlock * size), v = take(kKeyBlock * larger<int64_t>(size, kQueryBlock));
    factors = derivative = nullptr;
    if (args.options != nullptr) {
      factors = take(kKeyBlock * kQueryBlock), derivative = take(kKeyBlock * kQueryBlock);
    }
  }
};

// Keys of one block that some of the queries see.
struct KeyTile {
  int64_t first, keys;
};
KeyTile key_tile(const QueryBlock& block, int64_t key_block) {
  const int64_t first = larger(block.first, key_block * kKeyBlock);
  return {first, larger<int64_t>(0, smaller(block.end, (key_block + 1) * kKeyBlock) - first)};
}

template <class T>
void copy_rows(float* out, int64_t width, const T* x, int64_t stride, int64_t rows, int64_t size) {
  std::memset(out, 0, static_cast<size_t>(kQueryBlock * width) * sizeof(float));
  for (int64_t i = 0; i < rows; ++i) {
    for_vectors(size,
                [&](int64_t d, auto count) { store(out + i * width + d, load(x + i * stride + d, count), count); });
  }
}

// Loads what a block of queries needs, except for what `sum_queries` computes.
template <class T>
void load_queries(const AttentionBackward& args, const QueryBlock& block, const TileBuffers& to) {
  const Attention& call = args.call;
  const int64_t stride = call.heads * to.size, offset = query_offset(call, block.b, block.h, block.begin);
  const T *q = static_cast<const T*>(call.q) + offset, *cotangent = static_cast<const T*>(args.cotangent) + offset;
  arrange_queries(to.queries_t, q, stride, block.queries, to.size, call.scale * kLog2E, false);
  arrange_queries(to.cotangents_t, cotangent, stride, block.queries, to.size, 1.0f, false);
  if constexpr (kHasTiles<T>) {
    if (in_tiles(to.size)) {
      pair_rows(to.queries, q, stride, block.queries, kQueryBlock, to.size);
      return pair_rows(to.cotangents, cotangent, stride, block.queries, kQueryBlock, to.size);
    }
  }
  copy_rows(to.queries, to.width, q, stride, block.queries, to.size);
  copy_rows(to.cotangents, to.width, cotangent, stride, block.queries, to.size);
}

// to.dlogits = the gradients of the weights of a tile: the products of values and cotangents, times the factors of
// dropout.
template <class T, bool kOptions>
void weight_gradients(const Attention& call, const QueryBlock& block, const KeyTile& tile, const TileBuffers& to) {
  const auto [first, keys] = tile;
  const T* v = static_cast<const T*>(call.v) + key_offset(call, block.b, block.h, first);
  KeyRows rows{to.v};
  row_products<Simd::kOuterVectors>(to.dlogits, v, call.kv_heads * to.size, keys, to.size,
                                    arranged_lines<T>(to.cotangents_t, to.size), 1.0f, rows);
  if (!kOptions || !has_dropout(call.options)) return;
  dropout_factors(*call.options, block, call.kv_length, first, keys, to.factors);
  for (int64_t i = 0; i < keys * kQueryBlock; i += kLanes) {
    Simd::store(to.dlogits + i, Simd::mul(Simd::load(to.dlogits + i), Simd::load(to.factors + i)));
  }
}

// delta = the sum of cotangent * out, of a result in f32.
void sum_products(const float* out, int64_t stride, const QueryBlock& block, const TileBuffers& to) {
  for (int64_t i = 0; i < kQueryBlock; ++i) {
    F products = Simd::zero();
    if (i < block.queries) {
      for_vectors(to.size, [&](int64_t d, auto count) {
        products =
            Simd::fma(load(to.cotangents + i * to.width + d, count), load(out + i * stride + d, count), products);
      });
    }
    to.delta[i] = Simd::sum(products);
  }
}

// The share of `lse` in the gradients of the logits, weight * cotangent, is subtracted from delta.
void subtract_lse(const AttentionBackward& args, const QueryBlock& block, float* delta) {
  const int64_t heads = args.call.heads;
  const float* cotangent = args.lse_cotangent + (block.b * args.call.q_length + block.begin) * heads + block.h;
  for (int64_t i = 0; i < block.queries; ++i) delta[i] -= cotangent[i * heads];
}

// delta = the sum of cotangent * out; the highest of the scores (see score_tile), and 1 / the sum of what the logits
// are above it, which is zero for a query that sees no key, and past the last query. (Not the logarithm of the sum:
// added to a high logit, it would be lost.) Logits are kept in `kept`, rows of keys from block.first on, if there is
// room.
template <class T, bool kOptions>
void sum_queries(const AttentionBackward& args, const QueryBlock& block, const TileBuffers& to, float* kept) {
  constexpr int kVectors = Simd::kOuterVectors;
  // A result of 16 bits has lost what a gradient needs, as delta is subtracted from numbers of its size. So delta then
  // comes from the weights.
  constexpr bool kFromWeights = sizeof(T) < sizeof(float);
  const Attention& call = args.call;
  if constexpr (!kFromWeights) {
    const T* out = static_cast<const T*>(call.out) + query_offset(call, block.b, block.h, block.begin);
    sum_products(out, call.heads * to.size, block, to);
  }
  const F factor = Simd::broadcast(rest_of_scale<kOptions, T>(call));
  F highest[kVectors], sum[kVectors], delta[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    highest[v] = Simd::broadcast(kLowest), sum[v] = Simd::zero(), delta[v] = Simd::zero();
  }
  for (int64_t key_block = block.first / kKeyBlock; key_block * kKeyBlock < block.end; ++key_block) {
    const KeyTile tile = key_tile(block, key_block);
    const auto [first, keys] = tile;
    const T* k = static_cast<const T*>(call.k) + key_offset(call, block.b, block.h, first);
    float* scores = kept == nullptr ? to.weights : kept + (first - block.first) * kQueryBlock;
    KeyRows rows{to.k};
    score_tile<kOptions>(call, block, arranged_lines<T>(to.queries_t, to.size), k, first, keys, scores, rows);
    if constexpr (kFromWeights) weight_gradients<T, kOptions>(call, block, tile, to);
    for (int v = 0; v < kVectors; ++v) {
      const float *lines = scores + v * kLanes, *gradients = to.dlogits + v * kLanes;
      F top = highest[v];
      for (int64_t j = 0; j < keys; ++j) top = Simd::max(top, Simd::load(lines + j * kQueryBlock));
      const F shrink = Simd::exp2(Simd::mul(Simd::sub(highest[v], top), factor));
      F total = Simd::mul(sum[v], shrink), products = Simd::mul(delta[v], shrink);
      for (int64_t j = 0; j < keys; ++j) {
        const F power = Simd::exp2(Simd::mul(Simd::sub(Simd::load(lines + j * kQueryBlock), top), factor));
        total = Simd::add(total, power);
        if (kFromWeights) products = Simd::fma(power, Simd::load(gradients + j * kQueryBlock), products);
      }
      highest[v] = top, sum[v] = total, delta[v] = products;
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    const int queries = static_cast<int>(smaller<int64_t>(kLanes, larger<int64_t>(0, block.queries - v * kLanes)));
    const F inverse = Simd::first_or(inverse_or_zero(sum[v]), queries, 0.0f);
    Simd::store(to.highest + v * kLanes, highest[v]);
    Simd::store(to.inverse + v * kLanes, inverse);
    if (kFromWeights) Simd::store(to.delta + v * kLanes, Simd::mul(delta[v], inverse));
  }
  if (args.lse_cotangent != nullptr) subtract_lse(args, block, to.delta);
}

// Computes the weights of a tile after dropout, and the gradients of the logits before anything was added to them.
// `added` gets the gradients of what was added.
template <class T, bool kOptions, class Added>
void tile_gradients(const Attention& call, const QueryBlock& block, const KeyTile& tile, const TileBuffers& to,
                    const float* kept, const Added& added) {
  const auto [first, keys] = tile;
  if (kept == nullptr) {
    const T* k = static_cast<const T*>(call.k) + key_offset(call, block.b, block.h, first);
    KeyRows rows{to.k};
    score_tile<kOptions>(call, block, arranged_lines<T>(to.queries_t, to.size), k, first, keys, to.weights, rows,
                         to.derivative);
  }
  const float* scores = kept == nullptr ? to.weights : kept + (first - block.first) * kQueryBlock;
  weight_gradients<T, kOptions>(call, block, tile, to);
  const bool dropout = kOptions && has_dropout(call.options);
  const F factor = Simd::broadcast(rest_of_scale<kOptions, T>(call));
  for (int line = 0; line < kQueryBlock; line += kLanes) {
    const F inverse = Simd::load(to.inverse + line), highest = Simd::load(to.highest + line);
    const F delta = Simd::load(to.delta + line), positive = Simd::broadcast(__FLT_MIN__);
    const bool all_see = !Simd::any_less(inverse, positive);
    // Keys that a query does not see add nothing, also if keys or values are not finite.
    const auto seeing = [&](F x) { return all_see ? x : Simd::select_less(inverse, positive, Simd::zero(), x); };
    for (int64_t i = line; i < keys * kQueryBlock; i += kQueryBlock) {
      const F power = Simd::exp2(Simd::mul(Simd::sub(Simd::load(scores + i), highest), factor));
      const F weight = seeing(Simd::mul(power, inverse));
      Simd::store(to.weights + i, dropout ? Simd::mul(weight, Simd::load(to.factors + i)) : weight);
      Simd::store(to.dlogits + i, seeing(Simd::mul(weight, Simd::sub(Simd::load(to.dlogits + i), delta))));
    }
  }
  if constexpr (kOptions) {
    added(tile);
    if (call.options->soft_cap > 0) {
      for (int64_t i = 0; i < keys * kQueryBlock; i += kLanes) {
        Simd::store(to.dlogits + i, Simd::mul(Simd::load(to.dlogits + i), Simd::load(to.derivative + i)));
      }
    }
  }
}

}  // namespace
}  // namespace eqxcallback::cpu
