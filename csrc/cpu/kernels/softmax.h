// Softmax and its gradient, a row at a time: a pass for the largest element, one for the powers, which stay in cache,
// and one that divides them by their sum.
#pragma once

#include "cpu/kernels/math.h"
#include "cpu/kernels/streams.h"

namespace eqxcallback::cpu {
namespace {

// Keeps the lanes of x that take part, and puts `other` into the others. Without a mask all lanes take part.
template <class Count>
F taking(F x, const int8_t* mask, int64_t i, Count count, float other) {
  return mask == nullptr ? x : Simd::select_less(Simd::zero(), load(mask + i, count), x, Simd::broadcast(other));
}

// Returns the row of the mask for row r: bytes that are 0 or 1.
template <bool kMask>
const int8_t* mask_row(const RowMask& mask, int64_t r, int64_t size) {
  return kMask ? static_cast<const int8_t*>(mask.data) + r % mask.rows * size : nullptr;
}

// Computes the powers of e of a row, relative to the largest element that takes part, into `powers`, scratch of the
// row's size. Returns their sum: 0 if no element takes part, NaN if the result is NaN.
template <bool kMask, class T>
float softmax_powers(const T* x, const int8_t* mask, float* powers, int64_t size, float scale) {
  const float sign = scale < 0 ? -1.0f : 1.0f;
  const F direction = Simd::broadcast(sign),
          factor = Simd::broadcast(larger(kLowest, smaller(-kLowest, scale * kLog2E)));
  const float highest = Simd::maximum(fold(
      size, Simd::broadcast(-__builtin_inff()),
      [&](F acc, int64_t i, auto count) {
        const F v = first_or(Simd::mul(load(x + i, count), direction), count, -__builtin_inff());
        return Simd::max(acc, kMask ? taking(v, mask, i, count, -__builtin_inff()) : v);
      },
      Simd::max));
  // Subtracted before the multiplication, so that no product overflows. NaN, infinity, and a row of -inf become NaN
  // here. The factor is finite, as the highest element times infinity would be NaN.
  const F shift = Simd::broadcast(highest * sign);
  return sum_of(size, [&](F acc, int64_t i, auto count) {
    F power = Simd::exp2(Simd::mul(Simd::sub(load(x + i, count), shift), factor));
    if constexpr (kMask) power = taking(power, mask, i, count, 0);
    store(powers + i, power, count);
    return Simd::add(acc, first_or(power, count, 0));
  });
}

// Fills a row with `value` where elements take part: NaN, or 0 if no element does.
template <class T, class Put>
void fill_row(Put put, T* out, const int8_t* mask, int64_t size, float value) {
  for_vectors(size,
              [&](int64_t i, auto count) { put(out + i, taking(Simd::broadcast(value), mask, i, count, 0), count); });
}

// Prefetches a vector of the next row, whose maximum takes a pass that does little else. The processor sees it coming
// by itself if rows are short.
template <class T>
[[gnu::always_inline]] inline void prefetch_next_row(const T* x, int64_t size, int64_t i) {
  if (size * int64_t{sizeof(T)} > 8192) prefetch(x + size + i, kLanes);
}

template <bool kMask, class T, class Put>
void softmax_row(Put put, T* out, const T* x, const int8_t* mask, float* powers, int64_t size, float scale) {
  const float sum = softmax_powers<kMask>(x, mask, powers, size, scale);
  if (kMask && !(sum > 0)) return fill_row(put, out, mask, size, sum);
  const F inverse = Simd::broadcast(1.0f / sum);
  for_vectors(size, [&](int64_t i, auto count) {
    prefetch_next_row(x, size, i);
    put(out + i, Simd::mul(load(powers + i, count), inverse), count);
  });
}

template <bool kMask, class T>
void softmax_as(const Softmax& args, const Executor& executor) {
  const int64_t size = args.size;
  const double nanoseconds = static_cast<double>(size) * 0.3 + 20;
  const bool streams = exceeds_caches<T>(2 * args.rows * size, size, args.out);
  parallel_for(executor, args.rows, nanoseconds, [&](int64_t begin, int64_t end) {
    const Scratch scratch(size);
    with_stores<T>(streams, [&](auto put) {
      for (int64_t r = begin; r < end; ++r) {
        softmax_row<kMask>(put, static_cast<T*>(args.out) + r * size, static_cast<const T*>(args.x) + r * size,
                           mask_row<kMask>(args.mask, r, size), scratch.data(), size, args.scale);
      }
    });
  });
}

void softmax(Element element, const Softmax& args, const Executor& executor) {
  with_type(element, [&](auto* type) {
    using T = Pointee<decltype(type)>;
    args.mask.data == nullptr ? softmax_as<false, T>(args, executor) : softmax_as<true, T>(args, executor);
  });
}

// dx = scale * y * (dout - mean), of a row of results y, where the mean of dout has the weights y. It is divided by
// their sum, which is 1 but for the rounding of y: so a dout that is the same everywhere leaves nothing, in 16 bits
// too.
template <bool kMask, class T, class Put>
void softmax_backward_row(Put put, T* dx, const T* y, const T* dout, const int8_t* mask, int64_t size, float scale) {
  const auto [products, weights] = sums_of(size, [&](VectorPair acc, int64_t i, auto count) {
    const F weight = load(y + i, count);
    F upstream = load(dout + i, count);
    if constexpr (kMask) upstream = taking(upstream, mask, i, count, 0);
    return VectorPair{Simd::fma(upstream, weight, acc.first), Simd::add(acc.second, weight)};
  });
  // The weights are 0 where nothing takes part, and where all results of a long row are too small for f16.
  const F mean = Simd::broadcast(weights == 0 ? 0 : products / weights);
  const F factor = Simd::broadcast(scale);
  for_vectors(size, [&](int64_t i, auto count) {
    prefetch_next_row(y, size, i);
    prefetch_next_row(dout, size, i);
    F gradient = Simd::mul(Simd::mul(load(y + i, count), factor), Simd::sub(load(dout + i, count), mean));
    if constexpr (kMask) gradient = taking(gradient, mask, i, count, 0);
    put(dx + i, gradient, count);
  });
}

template <bool kMask, class T>
void softmax_backward_as(const SoftmaxBackward& args, const Executor& executor) {
  const Softmax& of = args.forward;
  const int64_t size = of.size;
  const double nanoseconds = static_cast<double>(size) * 0.1 + 20;
  const bool streams = exceeds_caches<T>(3 * of.rows * size, size, args.dx);
  parallel_for(executor, args.dx == nullptr ? 0 : of.rows, nanoseconds, [&](int64_t begin, int64_t end) {
    with_stores<T>(streams, [&](auto put) {
      for (int64_t r = begin; r < end; ++r) {
        softmax_backward_row<kMask>(put, static_cast<T*>(args.dx) + r * size, static_cast<const T*>(of.out) + r * size,
                                    static_cast<const T*>(args.dout) + r * size, mask_row<kMask>(of.mask, r, size),
                                    size, of.scale);
      }
    });
  });
}

void softmax_backward(Element element, const SoftmaxBackward& args, const Executor& executor) {
  with_type(element, [&](auto* type) {
    using T = Pointee<decltype(type)>;
    args.forward.mask.data == nullptr ? softmax_backward_as<false, T>(args, executor)
                                      : softmax_backward_as<true, T>(args, executor);
  });
}

}  // namespace
}  // namespace eqxcallback::cpu
