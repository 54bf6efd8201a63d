// Rotary position embedding (https://arxiv.org/abs/2104.09864), the halves of a head as real and imaginary parts.
#pragma once

#include "cpu/kernels/common.h"

namespace eqxcallback::cpu {
namespace {

void rotary_embedding(Element element, const RotaryEmbedding& args, const Executor& executor) {
  with_type(element, [&](auto* type) {
    using T = Pointee<decltype(type)>;
    const int64_t half = args.head_size / 2;
    const double nanoseconds = static_cast<double>(args.heads * args.head_size) * 0.15 + 5;
    parallel_for(executor, args.rows, nanoseconds, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const float* cos = args.cos + r % args.table_rows * half;
        const float* sin = args.sin + r % args.table_rows * half;
        for (int64_t h = 0; h < args.heads; ++h) {
          const int64_t offset = (r * args.heads + h) * args.head_size;
          const T* x = static_cast<const T*>(args.x) + offset;
          T* out = static_cast<T*>(args.out) + offset;
          for_vectors(half, [&](int64_t i, auto count) {
            const F a = load(x + i, count), b = load(x + half + i, count);
            const F c = load(cos + i, count), s = load(sin + i, count);
            store(out + i, Simd::sub(Simd::mul(a, c), Simd::mul(b, s)), count);
            store(out + half + i, Simd::fma(b, c, Simd::mul(a, s)), count);
          });
        }
      }
    });
  });
}

// The gradients of x and of the table, of whose rows each has a sum over all rows of x that are rotated by it.
void rotary_embedding_backward(Element element, const RotaryEmbeddingBackward& args, const Executor& executor) {
  with_type(element, [&](auto* type) {
    using T = Pointee<decltype(type)>;
    const int64_t half = args.head_size / 2, batch = args.table_rows == 0 ? 0 : args.rows / args.table_rows;
    const double nanoseconds = static_cast<double>(batch * args.heads * args.head_size) * 0.3 + 5;
    parallel_for(executor, args.table_rows, nanoseconds, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const float *cos = args.cos + t * half, *sin = args.sin + t * half;
        float *dcos = args.dcos + t * half, *dsin = args.dsin + t * half;
        std::memset(dcos, 0, static_cast<size_t>(half) * sizeof(float));
        std::memset(dsin, 0, static_cast<size_t>(half) * sizeof(float));
        for (int64_t b = 0; b < batch; ++b) {
          for (int64_t h = 0; h < args.heads; ++h) {
            const int64_t offset = ((b * args.table_rows + t) * args.heads + h) * args.head_size;
            const T *x = static_cast<const T*>(args.x) + offset, *dout = static_cast<const T*>(args.dout) + offset;
            T* dx = static_cast<T*>(args.dx) + offset;
            for_vectors(half, [&](int64_t i, auto count) {
              const F real = load(x + i, count), imaginary = load(x + half + i, count);
              const F da = load(dout + i, count), db = load(dout + half + i, count);
              const F c = load(cos + i, count), s = load(sin + i, count);
              store(dx + i, Simd::fma(da, c, Simd::mul(db, s)), count);
              store(dx + half + i, Simd::sub(Simd::mul(db, c), Simd::mul(da, s)), count);
              store(dcos + i, Simd::fma(da, real, Simd::fma(db, imaginary, load(dcos + i, count))), count);
              store(dsin + i, Simd::sub(Simd::fma(db, real, load(dsin + i, count)), Simd::mul(da, imaginary)), count);
            });
          }
        }
      }
    });
  });
}

}  // namespace
}  // namespace eqxcallback::cpu
