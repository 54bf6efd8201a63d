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
// row's size. Calls added(i, power, count) for each vector of powers, and returns their sum: 0 if no element takes
// part, NaN if the result is NaN.
template <bool kMask, class T, class Added>
float softmax_powers(const T* x, const int8_t* mask, float* powers, int64_t size, float scale, const Added& added) {
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
    power = first_or(power, count, 0);
    added(i, power, count);
    return Simd::add(acc, power);
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
  const float sum = softmax_powers<kMask>(x, mask, powers, size, scale, [](int64_t, F, auto) {});
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

// dx = factor * weight * (dout - dot) where elements take part, and 0 elsewhere. What was read for it is x or y.
template <bool kMask, class T, class Put>
void put_gradient(Put put, T* dx, const float* weights, const T* read, const T* dout, const int8_t* mask, int64_t size,
                  float factor, float dot) {
  const F factors = Simd::broadcast(factor), dots = Simd::broadcast(dot);
  for_vectors(size, [&](int64_t i, auto count) {
    prefetch_next_row(read, size, i);
    prefetch_next_row(dout, size, i);
    F gradient = Simd::mul(Simd::mul(load(weights + i, count), factors), Simd::sub(load(dout + i, count), dots));
    if constexpr (kMask) gradient = taking(gradient, mask, i, count, 0);
    put(dx + i, gradient, count);
  });
}

// dx = scale * y * (dout - sum(dout * y)), of a row of results y.
template <bool kMask, class Put>
void softmax_backward_row(Put put, float* dx, const float* y, const float* dout, const int8_t* mask, float* /*powers*/,
                          int64_t size, float scale) {
  const float dot = sum_of(size, [&](F acc, int64_t i, auto count) {
    F upstream = load(dout + i, count);
    if constexpr (kMask) upstream = taking(upstream, mask, i, count, 0);
    return Simd::fma(upstream, load(y + i, count), acc);
  });
  put_gradient<kMask>(put, dx, y, y, dout, mask, size, scale, dot);
}

// The same of a row of x: results rounded to 16 bits would be too coarse for the difference, and are computed anew.
template <bool kMask, class T, class Put>
void softmax_backward_row(Put put, T* dx, const T* x, const T* dout, const int8_t* mask, float* powers, int64_t size,
                          float scale) {
  F products = Simd::zero();
  const float sum = softmax_powers<kMask>(x, mask, powers, size, scale, [&](int64_t i, F power, auto count) {
    F upstream = load(dout + i, count);
    if constexpr (kMask) upstream = taking(upstream, mask, i, count, 0);
    products = Simd::fma(upstream, power, products);
  });
  if (kMask && !(sum > 0)) return fill_row(put, dx, mask, size, sum);
  const float inverse = 1.0f / sum;
  put_gradient<kMask>(put, dx, powers, x, dout, mask, size, scale * inverse, Simd::sum(products) * inverse);
}

template <bool kMask, class T>
void softmax_backward_as(const SoftmaxBackward& args, const Executor& executor) {
  const Softmax& of = args.forward;
  const int64_t size = of.size;
  const T* const read = static_cast<const T*>(std::is_same_v<T, float> ? of.out : of.x);
  const double nanoseconds = static_cast<double>(size) * 0.4 + 20;
  const bool streams = exceeds_caches<T>(3 * of.rows * size, size, args.dx);
  parallel_for(executor, args.dx == nullptr ? 0 : of.rows, nanoseconds, [&](int64_t begin, int64_t end) {
    const Scratch scratch(size);
    with_stores<T>(streams, [&](auto put) {
      for (int64_t r = begin; r < end; ++r) {
        softmax_backward_row<kMask>(put, static_cast<T*>(args.dx) + r * size, read + r * size,
                                    static_cast<const T*>(args.dout) + r * size, mask_row<kMask>(of.mask, r, size),
                                    scratch.data(), size, of.scale);
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
