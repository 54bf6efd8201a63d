// Attention of one new token over a cache: memory is read once and in its order, and each key and value serves all
// query heads of its group. Long caches are cut into parts for several threads, whose softmaxes are joined at the end.
#pragma once

#include "cpu/kernels/attention_options.h"
#include "cpu/kernels/dots.h"

namespace eqxcallback::cpu {
namespace {

inline constexpr int kPartKeys = 128;

// The state of one query's softmax over the keys of a part: the highest score, the sum, and the output, which is
// not yet divided by the sum.
struct Partial {
  float* state;

  static int64_t size(int64_t head_size) { return 2 + head_size; }
  float& highest() const { return state[0]; }
  float& sum() const { return state[1]; }
  float* out() const { return state + 2; }
  // The n-th state after this one, in the same memory.
  Partial after(int64_t n, int64_t head_size) const { return {state + n * size(head_size)}; }
  // Sets the state to that of no keys.
  void clear(int64_t head_size) const {
    std::memset(state, 0, static_cast<size_t>(size(head_size)) * sizeof(float));
    highest() = kLowest;
  }
};

// Adds the keys of b to a.
void join(Partial a, Partial b, int64_t head_size) {
  const float highest = larger(a.highest(), b.highest());
  const float left = __builtin_exp2f(a.highest() - highest), right = __builtin_exp2f(b.highest() - highest);
  for_vectors(head_size, [&](int64_t i, auto count) {
    const F scaled = Simd::mul(load(a.out() + i, count), Simd::broadcast(left));
    store(a.out() + i, Simd::fma(load(b.out() + i, count), Simd::broadcast(right), scaled), count);
  });
  a.sum() = a.sum() * left + b.sum() * right;
  a.highest() = highest;
}

// How one query's scores are changed: a cap, and a slope along the distance of the first key and of the others.
struct HeadOptions {
  float soft_cap, slope, away;
};

inline constexpr int kTileKeys = 4;         // keys that are multiplied together: a single sum waits for itself
inline constexpr int64_t kMostQueries = 4;  // the most queries that read a key together
static_assert(kLanes % kTileKeys == 0);

// The keys or values of a part, of all heads, and what is read after them.
template <class T>
struct Lines {
  const T* data;
  int64_t stride;
  int count;
  const T* after;
  Prefetching prefetching;

  // So much at a time that memory is read nearly in its order, and that the first cache has room for what comes next.
  static constexpr int64_t kTileBytes = 12 * 1024;
  int fitting() const {
    return static_cast<int>(smaller<int64_t>(kPartKeys, kTileBytes / larger<int64_t>(1, stride * int64_t{sizeof(T)})));
  }
  const T* at(int64_t j) const { return j < count ? data + j * stride : after + (j - count) * stride; }
};

// Calls body(queries, h, kv_head) for queries that share a head of keys: their number, and the first of them.
template <class Body>
[[gnu::always_inline]] inline void for_queries(int64_t heads, int64_t group, const Body& body) {
  for (int64_t kv_head = 0, h = 0; h < heads; ++kv_head) {
    for (const int64_t end = h + group; h < end;) {
      const int64_t n = smaller(kMostQueries, end - h);
      with_count<kMostQueries>(n, [&](auto queries) __attribute__((always_inline)) { body(queries, h, kv_head); });
      h += n;
    }
  }
}

// The products of all heads with a tile of keys, as vectors whose lanes are to be added, kLanes vectors at a time.
int64_t num_products(int64_t heads) { return (heads * kTileKeys + kLanes - 1) / kLanes * kLanes; }

// scores[h, j] = scale q[h] k[j]. The lines that come next are prefetched in the order of memory: the processor does
// not see them coming by itself.
template <class T>
void scores_of(float* scores, const Factor<T>* q, const Lines<T>& k, int64_t heads, int64_t group, int64_t head_size,
               float scale, F* products) {
  const int ahead = larger(kTileKeys, k.fitting());
  for (int j = 0; j < k.count; j += kTileKeys) {
    const T* lines[kTileKeys];
    for (int t = 0; t < kTileKeys; ++t) lines[t] = k.data + smaller(j + t, k.count - 1) * k.stride;
    const T* next = k.at(j + ahead);
    for_queries(heads, group, [&](auto queries, int64_t h, int64_t kv_head) __attribute__((always_inline)) {
      constexpr int kQueries = decltype(queries)::value, kTile = kQueries > 2 && !kManyRegisters ? 2 : kTileKeys;
      if (h % group == 0) prefetch(next + kv_head * kTileKeys * head_size, kTileKeys * head_size, k.prefetching);
      const T* rows[kTileKeys];
      for (int t = 0; t < kTileKeys; ++t) rows[t] = lines[t] + kv_head * head_size;
      for (int t = 0; t < kTileKeys; t += kTile) {
        dots<kQueries, kTile>(products + h * kTileKeys + t, kTileKeys, q + h * head_size, head_size, rows + t,
                              head_size);
      }
    });
    for (int64_t i = 0; i < num_products(heads); i += kLanes) {
      float totals[kLanes];
      Simd::store(totals, Simd::mul(Simd::sums(products + i), Simd::broadcast(scale)));
      const int64_t first = i / kTileKeys, last = smaller(heads, first + kLanes / kTileKeys);
      for (int64_t h = first; h < last; ++h) {
        std::memcpy(scores + h * kPartKeys + j, totals + (h - first) * kTileKeys, kTileKeys * sizeof(float));
      }
    }
  }
}

// Turns the scores of one query into the weights of its softmax.
void weigh(Partial partial, float* scores, int count, const HeadOptions& options) {
  const int end = (count + kLanes - 1) / kLanes * kLanes;
  if (options.soft_cap > 0) cap_logits(scores, nullptr, end, options.soft_cap);
  if (options.slope != 0) {
    for (int j = 0; j < count; ++j) scores[j] -= options.slope * (options.away - static_cast<float>(j));
  }
  for (int j = count; j < end; ++j) scores[j] = -__builtin_inff();
  // A NaN among the scores gets into the sum, if not into the highest.
  F largest = Simd::broadcast(kLowest);
  for (int j = 0; j < end; j += kLanes) largest = Simd::max(Simd::load(scores + j), largest);
  partial.highest() = Simd::maximum(largest);
  const F highest = Simd::broadcast(partial.highest());
  F sum = Simd::zero();
  for (int j = 0; j < end; j += kLanes) {
    const F weight = Simd::exp2(Simd::sub(Simd::load(scores + j), highest));
    sum = Simd::add(sum, weight);
    Simd::store(scores + j, weight);
  }
  partial.sum() = Simd::sum(sum);
}

// Adds some weighted values: kVectors vectors of them, from the i-th element on.
template <int kQueries, int kVectors, class T, class Count>
void add_vectors(float* const* outs, const float* weights, const T* v, int64_t stride, int count, int64_t i,
                 Count lanes) {
  F acc[kQueries][kVectors];
#pragma GCC unroll 4
  for (int g = 0; g < kQueries; ++g) {
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) acc[g][n] = load(outs[g] + i + n * kLanes, lanes);
  }
  add_outer(acc, weights, kPartKeys, 1, v + i, count, stride, lanes);
#pragma GCC unroll 4
  for (int g = 0; g < kQueries; ++g) {
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) store(outs[g] + i + n * kLanes, acc[g][n], lanes);
  }
}

// Adds the values, times their weights, to the outputs of the queries.
template <class T>
void add_values(Partial partials, const float* weights, const Lines<T>& v, int64_t heads, int64_t group,
                int64_t head_size) {
  const int tile = larger(kTileKeys, smaller(v.fitting(), 32));
  for (int j = 0; j < v.count; j += tile) {
    const T* next = v.at(j + larger(tile, v.fitting()));
    const int count = smaller(tile, v.count - j);
    for_queries(heads, group, [&](auto queries, int64_t h, int64_t kv_head) {
      constexpr int kQueries = decltype(queries)::value, kVectors = Simd::kOuterVectors;
      if (h % group == 0) prefetch(next + kv_head * tile * head_size, tile * head_size, v.prefetching);
      float* outs[kQueries];
      for (int g = 0; g < kQueries; ++g) outs[g] = partials.after(h + g, head_size).out();
      const float* of_head = weights + h * kPartKeys + j;
      const T* values = v.data + j * v.stride + kv_head * head_size;
      int64_t i = 0;
      for (; i + kVectors * kLanes <= head_size; i += kVectors * kLanes) {
        add_vectors<kQueries, kVectors>(outs, of_head, values, v.stride, count, i, Full{});
      }
      for_vectors(head_size - i, [&](int64_t rest, auto lanes) {
        add_vectors<kQueries, 1>(outs, of_head, values, v.stride, count, i + rest, lanes);
      });
    });
  }
}

// T: the type of q and the result. K: the type of keys and values.
template <class T, class K>
void decode_attention_as(const DecodeAttention& args, const Executor& executor) {
  const int64_t D = args.head_size, group = args.heads / args.kv_heads, stride = args.kv_heads * D;
  const Prefetching& prefetching = args.prefetching;
  const auto length_of = [&](int64_t b) {
    return smaller(args.kv_length, larger<int64_t>(0, args.length[b % args.length_batch]));
  };
  // The parts of a window begin where the window does.
  const auto first_of = [&](int64_t b) {
    return args.window == 0 ? 0 : larger<int64_t>(0, length_of(b) - args.window);
  };
  int64_t longest = 0;
  for (int64_t b = 0; b < smaller(args.batch, args.length_batch); ++b)
    longest = larger(longest, length_of(b) - first_of(b));
  const int64_t parts = larger<int64_t>(1, (longest + kPartKeys - 1) / kPartKeys);

  // One state for each example, part and query head.
  Scratch scratch(args.batch * parts * args.heads * Partial::size(D));
  const Partial states{scratch.data()};
  const double keys = static_cast<double>(smaller<int64_t>(longest, kPartKeys));
  const double nanoseconds = keys * static_cast<double>(args.heads * D) * 1.6 / kLanes + 100;
  parallel_for(executor, args.batch * parts, nanoseconds, [&](int64_t begin, int64_t end) {
    const Scratch widened(args.heads * D), weights(args.heads * kPartKeys), products(num_products(args.heads) * kLanes);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t part = task % parts, b = task / parts;
      const Partial partials = states.after(task * args.heads, D);
      for (int64_t h = 0; h < args.heads; ++h) partials.after(h, D).clear(D);
      const int64_t length = length_of(b), first = first_of(b) + part * kPartKeys;
      if (first >= length) continue;
      const int count = static_cast<int>(smaller<int64_t>(kPartKeys, length - first));
      const auto* q = as_factors<K>(static_cast<const T*>(args.q) + b * args.heads * D, args.heads * D, widened.data());
      const int64_t offset = (b % args.kv_batch * args.kv_length + first) * stride;
      const K *k = static_cast<const K*>(args.k) + offset, *v = static_cast<const K*>(args.v) + offset;
      scores_of<K>(weights.data(), q, {k, stride, count, v, prefetching}, args.heads, group, D, args.scale * kLog2E,
                   reinterpret_cast<F*>(products.data()));
      for (int64_t h = 0; h < args.heads; ++h) {
        float* of_head = weights.data() + h * kPartKeys;
        const auto scale_by = [&](const Operand<float>& scales) {
          const float* of_keys = operand_of(scales, b, h / group) + first * args.kv_heads;
          for (int j = 0; j < count; ++j) of_head[j] *= of_keys[j * args.kv_heads];
        };
        constexpr bool kInt8 = std::is_same_v<K, int8_t>;
        const float slope = args.slopes.data == nullptr ? 0.0f : *operand_of(args.slopes, b, h) * kLog2E;
        if constexpr (kInt8) scale_by(args.k_scale);
        weigh(partials.after(h, D), of_head, count, {args.soft_cap, slope, static_cast<float>(length - 1 - first)});
        if constexpr (kInt8) scale_by(args.v_scale);
      }
      add_values<K>(partials, weights.data(), {v, stride, count, k + count * stride, prefetching}, args.heads, group,
                    D);
    }
  });
  for (int64_t row = 0; row < args.batch * args.heads; ++row) {
    const int64_t first = row / args.heads * parts * args.heads + row % args.heads;
    const Partial all = states.after(first, D);
    for (int64_t part = 1; part < parts; ++part) join(all, states.after(first + part * args.heads, D), D);
    const F inverse = Simd::broadcast(all.sum() == 0.0f ? 0.0f : 1.0f / all.sum());
    T* out = static_cast<T*>(args.out) + row * D;
    for_vectors(D,
                [&](int64_t i, auto count) { store(out + i, Simd::mul(load(all.out() + i, count), inverse), count); });
  }
}

void decode_attention(Element element, const DecodeAttention& args, const Executor& executor) {
  with_type(element, [&](auto* type) {
    using T = Pointee<decltype(type)>;
    args.k_scale.data == nullptr ? decode_attention_as<T, T>(args, executor)
                                 : decode_attention_as<T, int8_t>(args, executor);
  });
}

}  // namespace
}  // namespace eqxcallback::cpu
