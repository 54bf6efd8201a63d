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

}  // namespace
}  // namespace eqxcallback::cpu
