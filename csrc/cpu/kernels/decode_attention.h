// Attention of one new token over a cache: memory is read once and in its order, and each key and value serves all
// query heads of its group. Long caches are cut into parts for several threads, whose softmaxes are joined at the end.
#pragma once

#include "cpu/kernels/common.h"

namespace eqxcallback::cpu {
namespace {

inline constexpr int64_t kPartKeys = 128;

// The state of an online softmax, of one query over some of the keys: the highest score, the sum, and the output, which
// is not yet divided by the sum.
struct Partial {
  float* state;

  static int64_t size(int64_t head_size) { return 2 + head_size; }
  float& highest() const { return state[0]; }
  float& sum() const { return state[1]; }
  float* out() const { return state + 2; }
};

// a takes the keys of b in.
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

// Takes at most kLanes keys, `stride` apart, into the softmax of a scaled query.
template <class T>
void take_keys(Partial partial, const float* q, const T* k, const T* v, int64_t stride, int keys, int64_t head_size) {
  constexpr int kTile = 4;  // sums at a time: one alone waits for itself
  F products[kLanes];
  for (int j = 0; j < kLanes; j += kTile) {
    F acc[kTile];
    const T* rows[kTile];
    for (int t = 0; t < kTile; ++t) {
      acc[t] = Simd::zero();
      rows[t] = k + smaller(j + t, keys - 1) * stride;
    }
    for_vectors(head_size, [&](int64_t i, auto count) {
      const F query = load(q + i, count);
#pragma GCC unroll 4
      for (int t = 0; t < kTile; ++t) acc[t] = Simd::fma(query, load(rows[t] + i, count), acc[t]);
    });
    for (int t = 0; t < kTile; ++t) products[j + t] = acc[t];
  }
  F scores = Simd::sums(products);
  float weights[kLanes];
  if (keys < kLanes) {
    Simd::store(weights, scores);
    for (int j = keys; j < kLanes; ++j) weights[j] = -__builtin_inff();
    scores = Simd::load(weights);
  }
  // A NaN among the scores gets into the sum, if not into the highest.
  const float highest = larger(partial.highest(), Simd::maximum(scores));
  const float shrink = highest == partial.highest() ? 1.0f : __builtin_exp2f(partial.highest() - highest);
  const F weight = Simd::exp2(Simd::sub(scores, Simd::broadcast(highest)));
  Simd::store(weights, weight);
  partial.highest() = highest;
  partial.sum() = partial.sum() * shrink + Simd::sum(weight);
  for_vectors(head_size, [&](int64_t i, auto count) {
    F acc[kTile] = {Simd::mul(load(partial.out() + i, count), Simd::broadcast(shrink))};
    for (int t = 1; t < kTile; ++t) acc[t] = Simd::zero();
    const auto add = [&](F& sum, int j) {
      sum = Simd::fma(Simd::broadcast(weights[j]), load(v + j * stride + i, count), sum);
    };
    int j = 0;
    for (; j + kTile <= keys; j += kTile) {
#pragma GCC unroll 4
      for (int t = 0; t < kTile; ++t) add(acc[t], j + t);
    }
    for (; j < keys; ++j) add(acc[0], j);
    store(partial.out() + i, Simd::add(Simd::add(acc[0], acc[1]), Simd::add(acc[2], acc[3])), count);
  });
}

void decode_attention(Element element, const DecodeAttention& args, const Executor& executor) {
  with_type(element, [&](auto* type) {
    using T = Pointee<decltype(type)>;
    const int64_t D = args.head_size, group = args.heads / args.kv_heads, stride = args.kv_heads * D;
    const auto length_of = [&](int64_t b) {
      return smaller(args.kv_length, larger<int64_t>(0, args.length[b % args.length_batch]));
    };
    int64_t longest = 0;
    for (int64_t b = 0; b < smaller(args.batch, args.length_batch); ++b) longest = larger(longest, length_of(b));
    const int64_t parts = larger<int64_t>(1, (longest + kPartKeys - 1) / kPartKeys);

    // One for each batch, part and query head.
    const int64_t state_size = Partial::size(D);
    Scratch scratch(args.batch * parts * args.heads * state_size);
    const auto partial = [&](int64_t index) { return Partial{scratch.data() + index * state_size}; };
    const double keys = static_cast<double>(smaller(longest, kPartKeys));
    const double nanoseconds = keys * static_cast<double>(args.heads * D) * 1.6 / kLanes + 100;
    parallel_for(executor, args.batch * parts, nanoseconds, [&](int64_t begin, int64_t end) {
      Scratch queries(args.heads * D);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t part = task % parts, b = task / parts;
        const T* q = static_cast<const T*>(args.q) + b * args.heads * D;
        for_vectors(args.heads * D, [&](int64_t i, auto count) {
          store(queries.data() + i, Simd::mul(load(q + i, count), Simd::broadcast(args.scale * kLog2E)), count);
        });
        for (int64_t h = 0; h < args.heads; ++h) {
          std::memset(partial(task * args.heads + h).state, 0, static_cast<size_t>(state_size) * sizeof(float));
          partial(task * args.heads + h).highest() = kLowest;
        }
        const int64_t offset = b % args.kv_batch * args.kv_length * stride;
        const int64_t last = smaller(length_of(b), (part + 1) * kPartKeys);
        for (int64_t j = part * kPartKeys; j < last; j += kLanes) {
          const int count = static_cast<int>(smaller<int64_t>(kLanes, last - j));
          for (int64_t h = 0; h < args.heads; ++h) {
            // The next keys, a share for each head: the processor does not see them coming by itself.
            const int64_t ahead = offset + (j + kLanes) * stride, share = kLanes * stride / args.heads;
            prefetch(static_cast<const T*>(args.k) + ahead + h * share, share);
            prefetch(static_cast<const T*>(args.v) + ahead + h * share, share);
            const int64_t start = offset + j * stride + h / group * D;
            take_keys(partial(task * args.heads + h), queries.data() + h * D, static_cast<const T*>(args.k) + start,
                      static_cast<const T*>(args.v) + start, stride, count, D);
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
      for_vectors(
          D, [&](int64_t i, auto count) { store(out + i, Simd::mul(load(all.out() + i, count), inverse), count); });
    }
  });
}

}  // namespace
}  // namespace eqxcallback::cpu
