// Activations quantised to int8, as the caller has asked: multiples of a 127th of the highest magnitude of a block.
#pragma once

#include "cpu/kernels/common.h"

namespace eqxcallback::cpu {
namespace {

// A value is n * scale, where n is the integer nearest to value * inverse.
struct Steps {
  float scale, inverse;
};

// Sums of values up to this, times GGUF weights without their scale, are finite.
inline constexpr float kSummable = 0x1p110f;

// Returns the highest magnitude of `size` values: infinity if a value is not finite.
float magnitude_of(const float* x, int64_t size) {
  const auto absolute = [&](F acc, int64_t i, auto count) { return Simd::max(acc, Simd::abs(load(x + i, count))); };
  const auto times_zero = [&](F acc, int64_t i, auto count) {
    return Simd::fma(load(x + i, count), Simd::zero(), acc);
  };
  return sum_of(size, times_zero) == 0 ? Simd::maximum(fold(size, Simd::zero(), absolute, Simd::max))
                                       : __builtin_inff();
}

// Computes the steps of `size` values. Returns false if a value is higher than `limit`, or not finite.
bool steps_of(Steps& steps, const float* x, int64_t size, float limit = -kLowest) {
  const float highest = magnitude_of(x, size);
  steps.scale = highest / 127;
  steps.inverse = highest < 0x1p-100f ? 0 : 127 / highest;  // lower values have no inverse
  return highest <= limit;
}

// Calls multiply(x) for rows of `size` values. If it returns false as some rows have values above `limit`, or such that
// are not finite, it gets zeros in their place, and alone(r) multiplies each of them: the other rows get what they get
// without them. Returns false if it returns false for another reason.
template <class Multiply, class Alone>
bool multiply_apart(const float* x, int64_t rows, int64_t size, float limit, const Multiply& multiply,
                    const Alone& alone) {
  if (multiply(x)) return true;
  const auto has_form = [&](int64_t r) { return magnitude_of(x + r * size, size) <= limit; };
  int64_t count = 0;
  for (int64_t r = 0; r < rows; ++r) count += has_form(r);
  if (count == 0 || count == rows) return false;
  Scratch others(rows * size);
  const auto bytes = static_cast<size_t>(size) * sizeof(float);
  for (int64_t r = 0; r < rows; ++r) {
    float* row = others.data() + r * size;
    has_form(r) ? std::memcpy(row, x + r * size, bytes) : std::memset(row, 0, bytes);
  }
  if (!multiply(static_cast<const float*>(others.data()))) return false;
  for (int64_t r = 0; r < rows; ++r) {
    if (!has_form(r)) alone(r);
  }
  return true;
}

// Calls tile(count, first) for at most kMost rows of x at a time, `count` an `Int`.
template <int kMost = 4, class Tile>
void for_few_rows(int64_t num_rows, const Tile& tile, int64_t first = 0) {
  for (; first + kMost <= num_rows; first += kMost) tile(Int<kMost>{}, first);
  if constexpr (kMost > 1) for_few_rows<kMost - 1>(num_rows, tile, first);
}

// Quantises blocks of `block` values, the last of which may be smaller. A block that is not finite stays as it is.
void quantize_activations(float* x, int64_t size, int64_t block) {
  for (int64_t begin = 0; begin < size; begin += block) {
    const int64_t n = smaller(block, size - begin);
    Steps steps;
    const bool is_finite = steps_of(steps, x + begin, n);
    for_vectors(n, [&](int64_t i, auto count) {
      const F v = load(x + begin + i, count);
      const F quantized =
          Simd::mul(Simd::nearest(Simd::mul(v, Simd::broadcast(steps.inverse))), Simd::broadcast(steps.scale));
      store(x + begin + i, is_finite ? quantized : v, count);
    });
  }
}

}  // namespace
}  // namespace eqxcallback::cpu
