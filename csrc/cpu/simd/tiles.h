// Tiles of a matrix product of bf16 in plain C++, for processors without AMX. This file lists and explains the
// functions that simd/amx.h defines too.
#pragma once

#include "cpu/types.h"

namespace eqxcallback::cpu {
namespace {

// Eight tiles of 16 rows, each of 64 bytes: 16 f32, or 16 pairs of bf16. A thread has them while it has a `Tiles`.
class Tiles {
 public:
  static constexpr int64_t kRows = 16, kPairs = 16, kColumns = 16;

  template <int t>
  static void zero() {
    std::memset(bytes(t), 0, 1024);
  }
  // Rows are `stride` bytes apart.
  template <int t>
  static void load(const void* p, int64_t stride) {
    for (int64_t r = 0; r < kRows; ++r) std::memcpy(bytes(t) + 64 * r, static_cast<const char*>(p) + r * stride, 64);
  }
  template <int t>
  static void store(void* p, int64_t stride) {
    for (int64_t r = 0; r < kRows; ++r) std::memcpy(static_cast<char*>(p) + r * stride, bytes(t) + 64 * r, 64);
  }
  // c[m, n] += sum_p a[m, 2 p] b[p, 2 n] + a[m, 2 p + 1] b[p, 2 n + 1], where a row of `b` is a pair for each column.
  template <int c, int a, int b>
  static void dot() {
    float sums[kColumns], pairs[2 * kColumns];
    for (int64_t m = 0; m < kRows; ++m) {
      char* row = bytes(c) + 64 * m;
      std::memcpy(sums, row, sizeof(sums));
      for (int64_t p = 0; p < kPairs; ++p) {
        const float even = number(a, m, 2 * p), odd = number(a, m, 2 * p + 1);
        for (int64_t n = 0; n < 2 * kColumns; ++n) pairs[n] = number(b, p, n);
        for (int64_t n = 0; n < kColumns; ++n) sums[n] += even * pairs[2 * n] + odd * pairs[2 * n + 1];
      }
      std::memcpy(row, sums, sizeof(sums));
    }
  }

 private:
  static char* bytes(int tile) {
    alignas(64) static thread_local char all[8 * 1024];
    return all + 1024 * tile;
  }
  static float number(int tile, int64_t row, int64_t at) {
    Bf16 value;
    std::memcpy(&value, bytes(tile) + 64 * row + 2 * at, sizeof(value));
    return to_float(value);
  }
};

}  // namespace
}  // namespace eqxcallback::cpu
