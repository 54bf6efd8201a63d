// Attention of one new token over a cache: each key and value is read once and serves all query heads of its group.
// Long caches are cut into parts for several threads, whose softmaxes are joined at the end.
#pragma once

#include "cpu/kernels/common.h"

namespace eqxcallback::cpu {
namespace {

inline constexpr int64_t kPartKeys = 512;

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
  F products[kLanes];
  for (int j = 0; j < kLanes; ++j) {
    products[j] = Simd::zero();
    if (j >= keys) continue;
    for_vectors(head_size, [&](int64_t i, auto count) {
      products[j] = Simd::fma(load(q + i, count), load(k + j * stride + i, count), products[j]);
    });
  }
  float weights[kLanes];
  Simd::store(weights, Simd::sums(products));
  float highest = partial.highest();
  for (int j = 0; j < keys; ++j) highest = larger(highest, weights[j]);
  const float shrink = __builtin_exp2f(partial.highest() - highest);
  Simd::store(weights, Simd::exp2(Simd::sub(Simd::load(weights), Simd::broadcast(highest))));
  partial.highest() = highest;
  partial.sum() *= shrink;
  for (int j = 0; j < keys; ++j) partial.sum() += weights[j];
  for_vectors(head_size, [&](int64_t i, auto count) {
    F acc = Simd::mul(load(partial.out() + i, count), Simd::broadcast(shrink));
    for (int j = 0; j < keys; ++j) acc = Simd::fma(Simd::broadcast(weights[j]), load(v + j * stride + i, count), acc);
    store(partial.out() + i, acc, count);
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

    // One for each batch, key/value head, part, and query of the group.
    const int64_t state_size = Partial::size(D);
    Scratch scratch(args.batch * args.kv_heads * parts * group * state_size);
    const auto partial = [&](int64_t index) { return Partial{scratch.data() + index * state_size}; };
    const double keys = static_cast<double>(smaller(longest, kPartKeys));
    const double nanoseconds = keys * static_cast<double>(group * D) / (2.0 * kLanes) + 100;
    parallel_for(executor, args.batch * args.kv_heads * parts, nanoseconds, [&](int64_t begin, int64_t end) {
      Scratch queries(group * D);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t part = task % parts, kv_head = task / parts % args.kv_heads, b = task / parts / args.kv_heads;
        const T* q = static_cast<const T*>(args.q) + (b * args.heads + kv_head * group) * D;
        for_vectors(group * D, [&](int64_t i, auto count) {
          store(queries.data() + i, Simd::mul(load(q + i, count), Simd::broadcast(args.scale * kLog2E)), count);
        });
        for (int64_t g = 0; g < group; ++g) {
          std::memset(partial(task * group + g).state, 0, static_cast<size_t>(state_size) * sizeof(float));
          partial(task * group + g).highest() = kLowest;
        }
        const int64_t offset = b % args.kv_batch * args.kv_length * stride + kv_head * D;
        const T* k = static_cast<const T*>(args.k) + offset;
        const T* v = static_cast<const T*>(args.v) + offset;
        const int64_t last = smaller(length_of(b), (part + 1) * kPartKeys);
        for (int64_t j = part * kPartKeys; j < last; j += kLanes) {
          const int count = static_cast<int>(smaller<int64_t>(kLanes, last - j));
          for (int64_t g = 0; g < group; ++g) {  // the keys stay in cache for the whole group
            take_keys(partial(task * group + g), queries.data() + g * D, k + j * stride, v + j * stride, stride, count,
                      D);
          }
        }
      }
    });
    for (int64_t row = 0; row < args.batch * args.heads; ++row) {
      const int64_t first = row / group * parts * group + row % group;
      const Partial all = partial(first);
      for (int64_t part = 1; part < parts; ++part) join(all, partial(first + part * group), D);
      const F inverse = Simd::broadcast(all.sum() == 0.0f ? 0.0f : 1.0f / all.sum());
      T* out = static_cast<T*>(args.out) + row * D;
      for_vectors(
          D, [&](int64_t i, auto count) { store(out + i, Simd::mul(load(all.out() + i, count), inverse), count); });
    }
  });
}

}  // namespace
}  // namespace eqxcallback::cpu
