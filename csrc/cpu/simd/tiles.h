// Tiles of matrix products in plain C++, for processors without AMX. This file lists and explains the functions that
// simd/amx.h defines too.
#pragma once

#include "cpu/types.h"

namespace eqxcallback::cpu {
namespace {

// Eight tiles of at most 16 rows, each of at most 64 bytes. A thread has them while it has a `Tiles` or `BlockTiles`.
class TileRegisters {
 public:
  static constexpr int64_t kRows = 16, kColumns = 16;
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;

  template <int t>
  static void zero() {
    std::memset(row_of(t, 0), 0, 1024);
  }
  // Rows are `stride` bytes apart.
  template <int t>
  static void load(const void* p, int64_t stride) {
    for (int64_t r = 0; r < shapes()[t].rows; ++r) {
      std::memcpy(row_of(t, r), static_cast<const char*>(p) + r * stride, static_cast<size_t>(shapes()[t].bytes));
    }
  }
  template <int t>
  static void store(void* p, int64_t stride) {
    for (int64_t r = 0; r < kRows; ++r) std::memcpy(static_cast<char*>(p) + r * stride, row_of(t, r), 64);
  }
  // Of integers: c[m, n] += sum_k a[m, k] b[k / 4, 4 n + k % 4], where a row of `b` is four bytes for each column.
  template <int c, int a, int b>
  static void dot_bytes() {
    int32_t sums[kColumns];
    for (int64_t m = 0; m < kRows; ++m) {
      std::memcpy(sums, row_of(c, m), sizeof(sums));
      for (int64_t k = 0; k < shapes()[a].bytes; ++k) {
        const int32_t factor = number<int8_t>(a, m, k);
        for (int64_t n = 0; n < kColumns; ++n) sums[n] += factor * number<int8_t>(b, k / 4, 4 * n + k % 4);
      }
      std::memcpy(row_of(c, m), sums, sizeof(sums));
    }
  }

 protected:
  struct Shape {
    int64_t rows, bytes;
  };
  TileRegisters() {
    for (int t = 0; t < 8; ++t) shapes()[t] = {kRows, 64};
  }
  ~TileRegisters() = default;

  static Shape* shapes() {
    static thread_local Shape all[8];
    return all;
  }
  static char* row_of(int tile, int64_t row) {
    alignas(64) static thread_local char all[8 * 1024];
    return all + 1024 * tile + 64 * row;
  }
  template <class T>
  static T number(int tile, int64_t row, int64_t at) {
    T value;
    std::memcpy(&value, row_of(tile, row) + at * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return value;
  }
};

// Of 16 f32, or of 16 pairs of bf16.
class Tiles : public TileRegisters {
 public:
  static constexpr int64_t kPairs = 16;

  // c[m, n] += sum_p a[m, 2 p] b[p, 2 n] + sum_p a[m, 2 p + 1] b[p, 2 n + 1], where a row of `b` is a pair for each
  // column.
  template <int c, int a, int b>
  static void dot() {
    float sums[kColumns];
    for (int64_t m = 0; m < kRows; ++m) {
      float both[2 * kColumns] = {};
      for (int64_t p = 0; p < kPairs; ++p) {
        const float factors[2] = {to_float(number<Bf16>(a, m, 2 * p)), to_float(number<Bf16>(a, m, 2 * p + 1))};
        for (int64_t n = 0; n < 2 * kColumns; ++n) both[n] += factors[n % 2] * to_float(number<Bf16>(b, p, n));
      }
      std::memcpy(sums, row_of(c, m), sizeof(sums));
      for (int64_t n = 0; n < kColumns; ++n) sums[n] += both[2 * n] + both[2 * n + 1];
      std::memcpy(row_of(c, m), sums, sizeof(sums));
    }
  }
};

// Tile kLeft has rows of 32 bytes, and tile kRight 8 rows: a block of weights.
class BlockTiles : public TileRegisters {
 public:
  static constexpr int kLeft = 6, kRight = 7;

  BlockTiles() { shapes()[kLeft].bytes = 32, shapes()[kRight].rows = 8; }
};

}  // namespace
}  // namespace eqxcallback::cpu
