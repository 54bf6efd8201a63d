// Rotary position embedding (https://arxiv.org/abs/2104.09864), the halves of a head as real and imaginary parts.
#pragma once

#include "cpu/kernels/streams.h"

namespace eqxcallback::cpu {
namespace {

// Rotates the halves of one head, with kBackward by the conjugate.
template <bool kBackward, class T, class Put>
[[gnu::always_inline]] inline void rotate(Put put, T* out, const T* x, const float* cos, const float* sin,
                                          int64_t half) {
  for_vectors(half, [&](int64_t i, auto count) {
    const F a = load(x + i, count), b = load(x + half + i, count);
    const F c = load(cos + i, count), s = load(sin + i, count);
    const F turn = kBackward ? s : Simd::sub(Simd::zero(), s);
    put(out + i, Simd::fma(b, turn, Simd::mul(a, c)), count);
    put(out + half + i, Simd::sub(Simd::mul(b, c), Simd::mul(a, turn)), count);
  });
}

template <bool kBackward, class T>
void rotate_all(T* out, const T* x, const float* cos, const float* sin, int64_t rows, int64_t table_rows, int64_t heads,
                int64_t head_size, const Executor& executor) {
  const int64_t half = head_size / 2;
  const double nanoseconds = static_cast<double>(heads * head_size) * 0.15 + 5;
  const bool streams = exceeds_caches<T>(2 * rows * heads * head_size, half, out);
  parallel_for(executor, rows, nanoseconds, [&](int64_t begin, int64_t end) {
    with_stores<T>(streams, [&](auto put) {
      for (int64_t r = begin; r < end; ++r) {
        const int64_t place = r % table_rows * half;
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t offset = (r * heads + h) * head_size;
          rotate<kBackward>(put, out + offset, x + offset, cos + place, sin + place, half);
        }
      }
    });
  });
}

void rotary_embedding(Element element, const RotaryEmbedding& args, const Executor& executor) {
  with_type(element, [&](auto* type) {
    using T = Pointee<decltype(type)>;
    rotate_all<false>(static_cast<T*>(args.out), static_cast<const T*>(args.x), args.cos, args.sin, args.rows,
                      args.table_rows, args.heads, args.head_size, executor);
  });
}

void rotary_append(Element element, const RotaryAppend& args, const Executor& executor) {
  with_type(element, [&](auto* type) {
    using T = Pointee<decltype(type)>;
    const int64_t half = args.head_size / 2, of_q = args.heads * args.head_size, of_kv = args.kv_heads * args.head_size;
    const double nanoseconds = static_cast<double>(of_q + 2 * of_kv) * 0.15 + 5;
    parallel_for(executor, args.examples * args.count, nanoseconds, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* from = static_cast<const T*>(args.qkv) + r * (of_q + 2 * of_kv);
        const float *cos = args.cos + r % args.table_rows * half, *sin = args.sin + r % args.table_rows * half;
        const int64_t example = r / args.count, most = args.length - args.count;
        const int64_t wanted = args.position[example % args.positions];
        const int64_t first = wanted < 0 ? 0 : wanted > most ? most : wanted;
        const int64_t place = (example * args.length + first + r % args.count) * of_kv;
        T *q = static_cast<T*>(args.q) + r * of_q, *k = static_cast<T*>(args.k_cache) + place;
        for (int64_t i = 0; i < of_q; i += args.head_size) rotate<false>(Store{}, q + i, from + i, cos, sin, half);
        from += of_q;
        for (int64_t i = 0; i < of_kv; i += args.head_size) rotate<false>(Store{}, k + i, from + i, cos, sin, half);
        std::memcpy(static_cast<T*>(args.v_cache) + place, from + of_kv, static_cast<size_t>(of_kv) * sizeof(T));
      }
    });
  });
}

// Adds to dcos and dsin, either of which may be null, for one head.
template <bool kCos, bool kSin, class T>
[[gnu::always_inline]] inline void add_to_table(float* dcos, float* dsin, const T* x, const T* dout, int64_t half) {
  for_vectors(half, [&](int64_t i, auto count) {
    const F real = load(x + i, count), imaginary = load(x + half + i, count);
    const F da = load(dout + i, count), db = load(dout + half + i, count);
    if constexpr (kCos) {
      store(dcos + i, Simd::fma(da, real, Simd::fma(db, imaginary, load(dcos + i, count))), count);
    }
    if constexpr (kSin) {
      store(dsin + i, Simd::sub(Simd::fma(db, real, load(dsin + i, count)), Simd::mul(da, imaginary)), count);
    }
  });
}

// Computes the gradients of the table too. A row of the table has a sum over all rows of x that it rotates.
template <bool kCos, bool kSin, class T>
void rotary_embedding_gradients(const RotaryEmbeddingBackward& args, const Executor& executor) {
  const int64_t half = args.head_size / 2, batch = args.table_rows == 0 ? 0 : args.rows / args.table_rows;
  const double nanoseconds = static_cast<double>(batch * args.heads * args.head_size) * 0.3 + 5;
  parallel_for(executor, args.table_rows, nanoseconds, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float *cos = args.cos + t * half, *sin = args.sin + t * half;
      float *dcos = kCos ? args.dcos + t * half : nullptr, *dsin = kSin ? args.dsin + t * half : nullptr;
      if constexpr (kCos) std::memset(dcos, 0, static_cast<size_t>(half) * sizeof(float));
      if constexpr (kSin) std::memset(dsin, 0, static_cast<size_t>(half) * sizeof(float));
      for (int64_t b = 0; b < batch; ++b) {
        for (int64_t h = 0; h < args.heads; ++h) {
          const int64_t offset = ((b * args.table_rows + t) * args.heads + h) * args.head_size;
          const T *x = static_cast<const T*>(args.x) + offset, *dout = static_cast<const T*>(args.dout) + offset;
          if (args.dx != nullptr) rotate<true>(Store{}, static_cast<T*>(args.dx) + offset, dout, cos, sin, half);
          add_to_table<kCos, kSin>(dcos, dsin, x, dout, half);
        }
      }
    }
  });
}

void rotary_embedding_backward(Element element, const RotaryEmbeddingBackward& args, const Executor& executor) {
  with_type(element, [&](auto* type) {
    using T = Pointee<decltype(type)>;
    if (args.dcos != nullptr) {
      args.dsin != nullptr ? rotary_embedding_gradients<true, true, T>(args, executor)
                           : rotary_embedding_gradients<true, false, T>(args, executor);
    } else if (args.dsin != nullptr) {
      rotary_embedding_gradients<false, true, T>(args, executor);
    } else if (args.dx != nullptr) {
      rotate_all<true>(static_cast<T*>(args.dx), static_cast<const T*>(args.dout), args.cos, args.sin, args.rows,
                       args.table_rows, args.heads, args.head_size, executor);
    }
  });
}

}  // namespace
}  // namespace eqxcallback::cpu
