// Attention of one new token over a cache: memory is read once and in its order, and each key and value serves all
// query heads of its group. Long caches are cut into parts for several threads, whose softmaxes are joined at the end.
#pragma once

#include "cpu/kernels/attention_options.h"
#include "cpu/kernels/dots.h"

namespace eqxcallback::cpu {
namespace {

inline constexpr int64_t kPartKeys = 128;

// The state of one query's online softmax over some of the keys: the highest score, the sum, and the output, which is
// not yet divided by the sum.
struct Partial {
  float* state;

  static int64_t size(int64_t head_size) { return 2 + head_size; }
  float& highest() const { return state[0]; }
  float& sum() const { return state[1]; }
  float* out() const { return state + 2; }
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

// The options of one head for its logits: a cap, and a slope along the distance of the first key and of the others.
struct HeadOptions {
  float soft_cap, slope, away;
};

inline constexpr int kStep = 64;
inline constexpr int64_t kStepBytes = 48 * 1024;  // the bytes of the keys of all heads in a step

// Keys and values of one head: at most kStep of each, `stride` apart, and where the next ones begin.
template <class T>
struct Keys {
  const T *k, *v;
  int64_t stride;
  int count;
  const T *next_k, *next_v;  // null if they are in cache
  // The scales of the first key in int8, and the distance between the scales of keys.
  const float *k_scale, *v_scale;
  int64_t scale_stride;
};
void scale_by(float* x, const float* scales, int64_t stride, int n) {
  for (int j = 0; j < n; ++j) x[j] *= scales[j * stride];
}

// Computes the scores of queries, which follow each other, times `scale`. Prefetches the next keys on the way: the
// processor does not see them coming by itself, and has only few requests at a time.
template <int kQueries, class T>
void scores_of(float (*scores)[kStep], const Factor<T>* q, const Keys<T>& keys, int64_t head_size, float scale) {
  constexpr int kTile = kQueries > 2 && !kManyRegisters ? 2 : 4;  // keys at a time: a single sum waits for itself
  for (int first = 0; first < keys.count; first += kLanes) {
    F products[kQueries][kLanes];
    for (int j = 0; j < kLanes; j += kTile) {
      const T* rows[kTile];
      for (int t = 0; t < kTile; ++t) {
        const int64_t row = smaller(first + j + t, keys.count - 1) * keys.stride;
        rows[t] = keys.k + row;
        if (keys.next_k != nullptr) {
          prefetch(keys.next_k + row, head_size);
          prefetch(keys.next_v + row, head_size);
        }
      }
      dots<kQueries, kTile>(products[0] + j, kLanes, q, head_size, rows, head_size);
    }
    for (int g = 0; g < kQueries; ++g) {
      Simd::store(scores[g] + first, Simd::mul(Simd::sums(products[g]), Simd::broadcast(scale)));
    }
  }
}

// Takes scores into the softmax of one query, and puts the weights of its keys in their place. Returns the factor of
// what was in the softmax before.
template <class T>
float weigh(Partial partial, const Keys<T>& keys, const HeadOptions& options, float* scores) {
  constexpr bool kInt8 = std::is_same_v<T, int8_t>;
  const int end = (keys.count + kLanes - 1) / kLanes * kLanes;
  if constexpr (kInt8) scale_by(scores, keys.k_scale, keys.scale_stride, keys.count);
  if (options.soft_cap > 0) cap_logits(scores, nullptr, end, options.soft_cap);
  if (options.slope != 0) {
    for (int j = 0; j < keys.count; ++j) scores[j] -= options.slope * (options.away - static_cast<float>(j));
  }
  for (int j = keys.count; j < end; ++j) scores[j] = -__builtin_inff();
  // A NaN among the scores gets into the sum, if not into the highest.
  F largest = Simd::broadcast(partial.highest());
  for (int j = 0; j < end; j += kLanes) largest = Simd::max(Simd::load(scores + j), largest);
  const float highest = Simd::maximum(largest);
  const float shrink = highest == partial.highest() ? 1.0f : __builtin_exp2f(partial.highest() - highest);
  F sum = Simd::zero();
  for (int j = 0; j < end; j += kLanes) {
    const F weight = Simd::exp2(Simd::sub(Simd::load(scores + j), Simd::broadcast(highest)));
    sum = Simd::add(sum, weight);
    Simd::store(scores + j, weight);
  }
  partial.highest() = highest;
  partial.sum() = partial.sum() * shrink + Simd::sum(sum);
  if constexpr (kInt8) scale_by(scores, keys.v_scale, keys.scale_stride, keys.count);
  return shrink;
}

// Adds the weighted values: kVectors vectors of them, from the i-th element on.
template <int kQueries, int kVectors, class T, class Count>
void add_values(const Partial* partials, const float (*weights)[kStep], const Keys<T>& keys, int64_t i, Count count) {
  F acc[kQueries][kVectors];
#pragma GCC unroll 4
  for (int g = 0; g < kQueries; ++g) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) acc[g][v] = load(partials[g].out() + i + v * kLanes, count);
  }
  add_outer(acc, weights[0], kStep, 1, keys.v + i, keys.count, keys.stride, count);
#pragma GCC unroll 4
  for (int g = 0; g < kQueries; ++g) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(partials[g].out() + i + v * kLanes, acc[g][v], count);
  }
}

// Takes the keys into the softmaxes of queries of one head of keys, which read them once.
template <int kQueries, class T>
void take_keys(const Partial* partials, const Factor<T>* q, const Keys<T>& keys, int64_t head_size, float scale,
               const HeadOptions* options) {
  float weights[kQueries][kStep];
  scores_of<kQueries, T>(weights, q, keys, head_size, scale);
  for (int g = 0; g < kQueries; ++g) {
    const float shrink = weigh(partials[g], keys, options[g], weights[g]);
    if (shrink == 1) continue;
    for_vectors(head_size, [&](int64_t i, auto count) {
      store(partials[g].out() + i, Simd::mul(load(partials[g].out() + i, count), Simd::broadcast(shrink)), count);
    });
  }
  constexpr int kVectors = Simd::kOuterVectors;
  int64_t i = 0;
  for (; i + kVectors * kLanes <= head_size; i += kVectors * kLanes) {
    add_values<kQueries, kVectors>(partials, weights, keys, i, Full{});
  }
  for (; i + kLanes <= head_size; i += kLanes) add_values<kQueries, 1>(partials, weights, keys, i, Full{});
  if (i < head_size) add_values<kQueries, 1>(partials, weights, keys, i, static_cast<int>(head_size - i));
}

inline constexpr int kMostQueries = 4;  // the most queries of one call of take_keys
template <class T>
using TakeKeys = void (*)(const Partial*, const Factor<T>*, const Keys<T>&, int64_t, float, const HeadOptions*);
template <class T>
inline constexpr TakeKeys<T> kTakeKeys[kMostQueries] = {take_keys<1, T>, take_keys<2, T>, take_keys<3, T>,
                                                        take_keys<4, T>};

// T: the type of q and the result. K: the type of keys and values.
template <class T, class K>
void decode_attention_as(const DecodeAttention& args, const Executor& executor) {
  const int64_t D = args.head_size, group = args.heads / args.kv_heads, stride = args.kv_heads * D;
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
  const int64_t state_size = Partial::size(D);
  Scratch scratch(args.batch * parts * args.heads * state_size);
  const auto partial = [&](int64_t index) { return Partial{scratch.data() + index * state_size}; };
  // Few keys of many heads at a time: memory likes to be read in its order. But two vectors of scores at least: a
  // softmax of one takes as long.
  const int64_t fitting = kStepBytes / larger<int64_t>(1, stride * static_cast<int64_t>(sizeof(K)));
  const int64_t step = smaller<int64_t>(kStep, larger<int64_t>(2 * kLanes, fitting / kLanes * kLanes));
  const double keys = static_cast<double>(smaller(longest, kPartKeys));
  const double nanoseconds = keys * static_cast<double>(args.heads * D) * 1.6 / kLanes + 100;
  parallel_for(executor, args.batch * parts, nanoseconds, [&](int64_t begin, int64_t end) {
    Scratch widened(args.heads * D);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t part = task % parts, b = task / parts;
      const auto* q = as_factors<K>(static_cast<const T*>(args.q) + b * args.heads * D, args.heads * D, widened.data());
      for (int64_t h = 0; h < args.heads; ++h) {
        std::memset(partial(task * args.heads + h).state, 0, static_cast<size_t>(state_size) * sizeof(float));
        partial(task * args.heads + h).highest() = kLowest;
      }
      const int64_t offset = b % args.kv_batch * args.kv_length * stride;
      const int64_t length = length_of(b), first = first_of(b) + part * kPartKeys;
      const int64_t last = smaller(length, first + kPartKeys);
      const auto place = [&](const void* x, int64_t j, int64_t kv_head) {
        return static_cast<const K*>(x) + offset + j * stride + kv_head * D;
      };
      for (int64_t j = first; j < last; j += step) {
        const int count = static_cast<int>(smaller(step, last - j));
        for (int64_t h = 0; h < args.heads;) {
          const int64_t kv_head = h / group;
          const int queries = static_cast<int>(smaller<int64_t>(kMostQueries, (kv_head + 1) * group - h));
          Keys<K> keys{};
          keys.k = place(args.k, j, kv_head), keys.v = place(args.v, j, kv_head);
          keys.stride = stride, keys.count = count;
          if (h % group == 0) {
            keys.next_k = place(args.k, j + step, kv_head), keys.next_v = place(args.v, j + step, kv_head);
          }
          if constexpr (std::is_same_v<K, int8_t>) {
            const int64_t row = j * args.kv_heads;
            keys.k_scale = operand_of(args.k_scale, b, kv_head) + row;
            keys.v_scale = operand_of(args.v_scale, b, kv_head) + row;
            keys.scale_stride = args.kv_heads;
          }
          Partial states[kMostQueries];
          HeadOptions options[kMostQueries];
          for (int g = 0; g < queries; ++g) {
            states[g] = partial(task * args.heads + h + g);
            const float slope = args.slopes.data == nullptr ? 0.0f : *operand_of(args.slopes, b, h + g) * kLog2E;
            options[g] = {args.soft_cap, slope, static_cast<float>(length - 1 - j)};
          }
          kTakeKeys<K>[queries - 1](states, q + h* D, keys, D, args.scale* kLog2E, options);
          h += queries;
        }
      }
    }
  });
  for (int64_t row = 0; row < args.batch * args.heads; ++row) {
    const int64_t first = row / args.heads * parts * args.heads + row % args.heads;
    const Partial all = partial(first);
    for (int64_t part = 1; part < parts; ++part) join(all, partial(first + part * args.heads), D);
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
