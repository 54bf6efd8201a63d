// The gradients of attention: every sum is made by one thread, in one order, whatever the number of threads.
//
// Two ways, with the same bits: a thread that has a key/value head for itself computes each tile once, for all
// gradients; where there are fewer heads than threads, one pass goes along the queries and another along the keys.
#pragma once

#include "cpu/kernels/attention_gradients.h"

namespace eqxcallback::cpu {
namespace {

// Blocks of queries or of keys.
struct BlockRange {
  int64_t begin, end;
};

// The data that all tasks of a call share. Rows are numbered by example, head and query.
struct BackwardPlan {
  const AttentionBackward& args;
  int64_t query_blocks, key_blocks, width;
  bool own_bias;      // each head of each example has a bias of its own
  float* sums;        // the sums of queries, [3, B, H, S], or null if they are not read again
  float* slope_sums;  // [B, H, query_blocks]

  bool needs_keys() const { return args.dk != nullptr || args.dv != nullptr; }
  bool has_own_bias() const { return args.dbias != nullptr && own_bias; }
  bool has_shared_bias() const { return args.dbias != nullptr && !own_bias; }
  bool queries_share_bias() const { return args.call.options->bias.query == 0 && args.call.q_length != 1; }
  int64_t bias_rows() const { return queries_share_bias() ? 1 : args.call.q_length; }
  int64_t row(int64_t b, int64_t h) const { return b * args.call.heads + h; }
  int64_t num_queries() const { return args.call.batch * args.call.heads * args.call.q_length; }
};

// out[i, j] = dlogits[j, i]
template <class T>
void store_bias(T* out, const float* dlogits, int64_t keys, int64_t queries, int64_t stride) {
  store_columns(out, stride, queries, keys, dlogits, [](int64_t) { return Simd::broadcast(1.0f); });
}

template <class Body>
void with_bias_rows(const BackwardPlan& plan, int64_t at, int64_t begin, const Body& body) {
  with_type(plan.args.call.options->bias_element, [&](auto* type) {
    using T = Pointee<decltype(type)>;
    body(static_cast<T*>(plan.args.dbias) + at + begin * plan.args.call.kv_length);
  });
}

// Adds a tile's share to dk and dv, either of which may be null: to their rows from the tile's first key on. The
// weights and gradients of its logits are not read after this.
template <class T>
void add_to_keys(float* dk, float* dv, const KeyTile& tile, const TileBuffers& to) {
  const auto add = [&](float* out, float* factors, float* rows) {
    if (out == nullptr) return;
    if constexpr (kHasTiles<T>) {
      if (in_tiles(to.size)) {
        return tile_product<true>(out, to.width, tile.keys, split_lines(factors, tile.keys, kQueryBlock),
                                  {rows, to.width, 0, 1}, kQueryBlock / kTileSize, to.size);
      }
    }
    add_product(out, tile.keys, factors, kQueryBlock, 1, rows, kQueryBlock, to.width);
  };
  add(dk, to.dlogits, to.queries);
  add(dv, to.weights, to.cotangents);
}

// Adds a tile's share to the gradients of its queries.
template <class T>
void add_to_queries(const Attention& call, const QueryBlock& block, const KeyTile& tile, const TileBuffers& to) {
  const T* rows = static_cast<const T*>(call.k) + key_offset(call, block.b, block.h, tile.first);
  const int64_t stride = call.kv_heads * to.size;
  if constexpr (kHasTiles<T>) {
    if (in_tiles(to.size)) {
      auto* transposed = reinterpret_cast<Bf16*>(to.k);
      transpose_rows(transposed, kKeyBlock, rows, stride, tile.keys, to.size);
      const RightPairs pairs = pairs_of_lines<T>(to.v, kQueryBlock);
      split_into_pairs<T>(pairs, to.dlogits, tile.keys, kQueryBlock);
      return tile_product<true>(to.dq_t, kQueryBlock, to.size, {transposed, kKeyBlock, 0, 1}, pairs,
                                steps_of(tile.keys), kQueryBlock);
    }
  }
  const Rows k = as_floats(rows, stride, tile.keys, to.size, to.k);
  outer_product<true>(to.dq_t, to.size, k.data, 1, k.stride, to.dlogits, tile.keys);
}

// Computes dq of one block of queries, and adds the block's share to the other gradients: dk and dv [T, width], if any.
template <class T, bool kOptions>
void block_gradients(const BackwardPlan& plan, const QueryBlock& block, const TileBuffers& to, float* kept, float* dk,
                     float* dv) {
  const AttentionBackward& args = plan.args;
  const Attention& call = args.call;
  const AttentionOptions* options = call.options;
  const int64_t D = to.size, stride = call.heads * D, keys_in_all = call.kv_length;
  const bool keeps = block.end - block.first <= kKeptKeys && (options == nullptr || options->soft_cap == 0);
  kept = keeps ? kept : nullptr;
  load_queries<T>(args, block, to);
  sum_queries<T, kOptions>(args, block, to, kept);
  if (plan.sums != nullptr) {
    float* kept_sums = plan.sums + plan.row(block.b, block.h) * call.q_length + block.begin;
    const float* const known[] = {to.highest, to.inverse, to.delta};
    for (const float* values : known) {
      std::memcpy(kept_sums, values, static_cast<size_t>(block.queries) * sizeof(float));
      kept_sums += plan.num_queries();
    }
  }
  const bool bias = plan.has_own_bias(), slopes = args.dslopes != nullptr, queries = args.dq != nullptr;
  if (!queries && !bias && !slopes && dk == nullptr && dv == nullptr) return;
  const int64_t bias_at = bias ? options->bias.at[block.b] + block.h * options->bias.head : 0;
  if (bias && keys_in_all > 0) {
    with_bias_rows(plan, bias_at, block.begin, [&](auto* rows) {
      std::memset(rows, 0, static_cast<size_t>(block.queries * keys_in_all) * sizeof(*rows));
    });
  }
  F slope_sum = Simd::zero();
  const auto added = [&](const KeyTile& tile) {
    if (bias) {
      with_bias_rows(plan, bias_at, block.begin, [&](auto* rows) {
        store_bias(rows + tile.first, to.dlogits, tile.keys, block.queries, keys_in_all);
      });
    }
    if (!slopes) return;
    const Distances distances;
    for (int64_t j = 0; j < tile.keys; ++j) {
      for (int i = 0; i < kQueryBlock; i += kLanes) {
        const F away = distances(block.position - tile.first - j, i);
        slope_sum = Simd::fma(away, Simd::load(to.dlogits + j * kQueryBlock + i), slope_sum);
      }
    }
  };
  if (queries) std::memset(to.dq_t, 0, static_cast<size_t>(D * kQueryBlock) * sizeof(float));
  for (int64_t key_block = block.first / kKeyBlock; key_block * kKeyBlock < block.end; ++key_block) {
    const KeyTile tile = key_tile(block, key_block);
    tile_gradients<T, kOptions>(call, block, tile, to, kept, added);
    if (queries) add_to_queries<T>(call, block, tile, to);
    const int64_t at = tile.first * to.width;
    add_to_keys<T>(dk == nullptr ? nullptr : dk + at, dv == nullptr ? nullptr : dv + at, tile, to);
  }
  if (queries) {
    T* dq = static_cast<T*>(args.dq) + query_offset(call, block.b, block.h, block.begin);
    store_columns(dq, stride, block.queries, D, to.dq_t, [&](int64_t) { return Simd::broadcast(call.scale); });
  }
  if (slopes)
    plan.slope_sums[plan.row(block.b, block.h) * plan.query_blocks + block.begin / kQueryBlock] = Simd::sum(slope_sum);
}

// Stores dk and dv, either of which may be null, from row `first` of one head.
template <class T>
void store_keys(const BackwardPlan& plan, int64_t kv_b, int64_t kv_h, int64_t first, int64_t keys, const float* dk,
                const float* dv) {
  const Attention& call = plan.args.call;
  const auto store_rows = [&](void* to, const float* sums, const auto& finished) {
    if (to == nullptr) return;
    for (int64_t j = 0; j < keys; ++j) {
      T* row = static_cast<T*>(to) + ((kv_b * call.kv_length + first + j) * call.kv_heads + kv_h) * call.head_size;
      for_vectors(call.head_size, [&](int64_t d, auto count) {
        store(row + d, finished(load(sums + j * plan.width + d, count)), count);
      });
    }
  };
  store_rows(plan.args.dk, dk, [&](F x) { return Simd::mul(x, Simd::broadcast(call.scale)); });
  store_rows(plan.args.dv, dv, [](F x) { return x; });
}

// Calls body(b, h, begin) for the blocks of queries that use one key/value head, in the order of all sums over them.
template <class Body>
void for_query_blocks(const BackwardPlan& plan, int64_t kv_b, int64_t kv_h, const Body& body) {
  const Attention& call = plan.args.call;
  const int64_t group = call.heads / call.kv_heads;
  for (int64_t b = kv_b; b < call.batch; b += call.kv_batch) {
    for (int64_t h = kv_h * group; h < (kv_h + 1) * group; ++h) {
      for (int64_t block = 0; block < plan.query_blocks; ++block) body(query_block(call, b, h, block * kQueryBlock));
    }
  }
}

// Computes the tiles of a block of queries again, with the sums that are already known.
template <class T, bool kOptions, class Added, class Body>
void again(const BackwardPlan& plan, const QueryBlock& block, int64_t begin, int64_t end, const TileBuffers& to,
           const Added& added, const Body& body) {
  const Attention& call = plan.args.call;
  bool is_loaded = false;
  for (int64_t key_block = begin; key_block < end; ++key_block) {
    const KeyTile tile = key_tile(block, key_block);
    if (tile.keys == 0) continue;
    if (!is_loaded) {
      load_queries<T>(plan.args, block, to);
      const float* kept_sums = plan.sums + plan.row(block.b, block.h) * call.q_length + block.begin;
      float* const known[] = {to.highest, to.inverse, to.delta};
      for (float* values : known) {
        std::memset(values, 0, kQueryBlock * sizeof(float));
        std::memcpy(values, kept_sums, static_cast<size_t>(block.queries) * sizeof(float));
        kept_sums += plan.num_queries();
      }
      is_loaded = true;
    }
    tile_gradients<T, kOptions>(call, block, tile, to, nullptr, added);
    body(tile);
  }
}

// Computes dk and dv of one block of keys. Either may be null.
template <class T, bool kOptions>
void key_gradients(const BackwardPlan& plan, int64_t kv_b, int64_t kv_h, int64_t key_block, const TileBuffers& to,
                   float* dk, float* dv) {
  const int64_t begin = key_block * kKeyBlock, keys = smaller<int64_t>(kKeyBlock, plan.args.call.kv_length - begin);
  if (dk != nullptr) std::memset(dk, 0, static_cast<size_t>(keys * plan.width) * sizeof(float));
  if (dv != nullptr) std::memset(dv, 0, static_cast<size_t>(keys * plan.width) * sizeof(float));
  const auto nothing = [](const KeyTile&) {};
  for_query_blocks(plan, kv_b, kv_h, [&](const QueryBlock& block) {
    again<T, kOptions>(plan, block, key_block, key_block + 1, to, nothing, [&](const KeyTile& tile) {
      const int64_t at = (tile.first - begin) * to.width;
      add_to_keys<T>(dk == nullptr ? nullptr : dk + at, dv == nullptr ? nullptr : dv + at, tile, to);
    });
  });
  store_keys<T>(plan, kv_b, kv_h, begin, keys, dk, dv);
}

// Adds up the gradients of logits of a bias that heads or examples share, of some blocks of queries and of keys, into
// `sums`: [keys, kQueryBlock] from key `first` on.
template <class T>
void sum_dlogits(const BackwardPlan& plan, int64_t at, BlockRange queries, BlockRange keys, const TileBuffers& to,
                 float* sums) {
  const Attention& call = plan.args.call;
  const Operand<void>& bias = call.options->bias;
  const int64_t first = keys.begin * kKeyBlock, end = smaller(keys.end * kKeyBlock, call.kv_length);
  std::memset(sums, 0, static_cast<size_t>((end - first) * kQueryBlock) * sizeof(float));
  const auto nothing = [](const KeyTile&) {};
  const auto add = [&](const KeyTile& tile) {
    float* line = sums + (tile.first - first) * kQueryBlock;
    for (int64_t i = 0; i < tile.keys * kQueryBlock; i += kLanes) {
      Simd::store(line + i, Simd::add(Simd::load(line + i), Simd::load(to.dlogits + i)));
    }
  };
  for (int64_t b = 0; b < call.batch; ++b) {
    for (int64_t h = 0; h < call.heads; ++h) {
      if (bias.at[b] + h * bias.head != at) continue;
      for (int64_t block = queries.begin; block < queries.end; ++block) {
        again<T, true>(plan, query_block(call, b, h, block * kQueryBlock), keys.begin, keys.end, to, add, nothing);
      }
    }
  }
}

// Computes the gradient of a bias that heads, examples or queries share: of a block of rows, or, where there is one
// row, of a block of keys.
template <class T>
void bias_gradients(const BackwardPlan& plan, int64_t bias, int64_t block, const TileBuffers& to, float* sums) {
  const Attention& call = plan.args.call;
  const int64_t keys_in_all = call.kv_length, at = bias * plan.bias_rows() * keys_in_all;
  if (!plan.queries_share_bias()) {
    sum_dlogits<T>(plan, at, {block, block + 1}, {0, plan.key_blocks}, to, sums);
    const int64_t begin = block * kQueryBlock;
    with_bias_rows(plan, at, begin, [&](auto* out) {
      store_bias(out, sums, keys_in_all, smaller<int64_t>(kQueryBlock, call.q_length - begin), keys_in_all);
    });
  } else {
    sum_dlogits<T>(plan, at, {0, plan.query_blocks}, {block, block + 1}, to, sums);
    const int64_t first = block * kKeyBlock, keys = smaller<int64_t>(kKeyBlock, keys_in_all - first);
    for (int64_t j = 0; j < keys; ++j) {
      F sum = Simd::zero();
      for (int i = 0; i < kQueryBlock; i += kLanes) sum = Simd::add(sum, Simd::load(sums + j * kQueryBlock + i));
      sums[j] = Simd::sum(sum);
    }
    with_bias_rows(plan, at, 0, [&](auto* out) {
      for_vectors(keys, [&](int64_t j, auto count) { store(out + first + j, load(sums + j, count), count); });
    });
  }
}

template <class T, bool kOptions>
void run_backward(const BackwardPlan& plan, const Executor& executor, bool is_whole) {
  const Attention& call = plan.args.call;
  const int64_t D = call.head_size, buffers = TileBuffers::floats(call);
  const int64_t kept = smaller(kKeptKeys, call.kv_length) * kQueryBlock;
  const double tile = keys_seen(call) * static_cast<double>(D * kQueryBlock) / kLanes + 1000;
  if (is_whole) {
    const double nanoseconds = static_cast<double>(plan.query_blocks * (call.heads / call.kv_heads)) * 5 * tile;
    parallel_for(executor, call.kv_batch * call.kv_heads, nanoseconds, [&](int64_t begin, int64_t end) {
      const int64_t sums = call.kv_length * plan.width;
      Scratch scratch(buffers + kept + 2 * sums);
      const TileBuffers to(call, scratch.data());
      [[maybe_unused]] const TilesFor<T> tiles;
      float *logits = scratch.data() + buffers, *both = logits + kept;
      float *dk = plan.args.dk == nullptr ? nullptr : both, *dv = plan.args.dv == nullptr ? nullptr : both + sums;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t kv_b = i / call.kv_heads, kv_h = i % call.kv_heads;
        std::memset(both, 0, static_cast<size_t>(2 * sums) * sizeof(float));
        for_query_blocks(plan, kv_b, kv_h, [&](const QueryBlock& block) {
          block_gradients<T, kOptions>(plan, block, to, logits, dk, dv);
        });
        store_keys<T>(plan, kv_b, kv_h, 0, call.kv_length, dk, dv);
      }
    });
  } else {
    const int64_t rows = call.batch * call.heads * plan.query_blocks;
    parallel_for(executor, rows, 3 * tile, [&](int64_t begin, int64_t end) {
      Scratch scratch(buffers + kept);
      const TileBuffers to(call, scratch.data());
      [[maybe_unused]] const TilesFor<T> tiles;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = i / plan.query_blocks, first = i % plan.query_blocks * kQueryBlock;
        const QueryBlock block = query_block(call, row / call.heads, row % call.heads, first);
        block_gradients<T, kOptions>(plan, block, to, scratch.data() + buffers, nullptr, nullptr);
      }
    });
    const int64_t tasks = plan.needs_keys() ? call.kv_batch * call.kv_heads * plan.key_blocks : 0;
    const double nanoseconds = static_cast<double>(rows) / static_cast<double>(larger<int64_t>(tasks, 1)) * 4 * tile;
    parallel_for(executor, tasks, nanoseconds, [&](int64_t begin, int64_t end) {
      const int64_t sums = kKeyBlock * plan.width;
      Scratch scratch(buffers + 2 * sums);
      const TileBuffers to(call, scratch.data());
      [[maybe_unused]] const TilesFor<T> tiles;
      float* both = scratch.data() + buffers;
      float *dk = plan.args.dk == nullptr ? nullptr : both, *dv = plan.args.dv == nullptr ? nullptr : both + sums;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t head = i / plan.key_blocks;
        key_gradients<T, kOptions>(plan, head / call.kv_heads, head % call.kv_heads, i % plan.key_blocks, to, dk, dv);
      }
    });
  }
  if (!plan.has_shared_bias()) return;
  const int64_t biases = plan.args.bias_size / larger<int64_t>(1, plan.bias_rows() * call.kv_length);
  const int64_t blocks = plan.queries_share_bias() ? plan.key_blocks : plan.query_blocks;
  const double nanoseconds = static_cast<double>(call.batch * call.heads * plan.query_blocks) /
                             static_cast<double>(larger<int64_t>(biases * blocks, 1)) * 2 * tile;
  parallel_for(executor, biases * blocks, nanoseconds, [&](int64_t begin, int64_t end) {
    Scratch scratch(buffers + larger<int64_t>(call.kv_length, kKeyBlock) * kQueryBlock);
    const TileBuffers to(call, scratch.data());
    [[maybe_unused]] const TilesFor<T> tiles;
    for (int64_t i = begin; i < end; ++i) {
      bias_gradients<T>(plan, i / blocks, i % blocks, to, scratch.data() + buffers);
    }
  });
}

void attention_backward(Element element, const AttentionBackward& args, const Executor& executor) {
  const Attention& call = args.call;
  const int64_t rows = call.batch * call.heads, heads = call.kv_batch * call.kv_heads;
  BackwardPlan plan{args,
                    (call.q_length + kQueryBlock - 1) / kQueryBlock,
                    (call.kv_length + kKeyBlock - 1) / kKeyBlock,
                    padded(call.head_size),
                    args.bias_size == rows * call.q_length * call.kv_length,
                    nullptr,
                    nullptr};
  // Tiles computed twice are a third more work: that much may wait for the last head.
  const int64_t threads = executor.threads(executor.pool), rounds = (heads + threads - 1) / larger<int64_t>(threads, 1);
  const bool is_whole = plan.needs_keys() && 3 * rounds * threads <= 4 * heads;
  const bool keeps_sums = (plan.needs_keys() && !is_whole) || plan.has_shared_bias();
  Scratch sums(keeps_sums ? 3 * plan.num_queries() : 0);
  Scratch slopes(args.dslopes == nullptr ? 0 : rows * plan.query_blocks);
  if (keeps_sums) plan.sums = sums.data();
  plan.slope_sums = slopes.data();
  with_type(element, [&](auto* type) {
    using T = Pointee<decltype(type)>;
    const auto run = call.options == nullptr ? run_backward<T, false> : run_backward<T, true>;
    run(plan, executor, is_whole);
  });
  if (args.dslopes == nullptr) return;
  for (int64_t i = 0; i < args.slopes_size; ++i) args.dslopes[i] = 0.0f;
  for (int64_t i = 0; i < rows * plan.query_blocks; ++i) {
    const int64_t row = i / plan.query_blocks, b = row / call.heads;
    args.dslopes[call.options->slopes.at[b] + row % call.heads * call.options->slopes.head] -= slopes.data()[i];
  }
}

}  // namespace
}  // namespace eqxcallback::cpu
