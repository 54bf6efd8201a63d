// How `matrix_product` takes its factors, which says how much memory it needs beside them.
#pragma once

#include "cpu/kernels.h"

namespace eqxcallback::cpu {
namespace {

// A tile has 16 lines of 32 numbers, along which a product sums: rows or columns of a factor. Two tiles are a block.
inline constexpr int64_t kTileLines = 16, kTileSize = 32, kTileNumbers = kTileLines * kTileSize;
inline constexpr int64_t kBlockLines = 2 * kTileLines, kFewLines = 8 * kBlockLines;

inline int64_t blocks_of(int64_t lines) { return (lines + kBlockLines - 1) / kBlockLines; }
inline int64_t steps_of(int64_t size) { return (size + kTileSize - 1) / kTileSize; }

// One factor is on the left, with the rows of the result, unless it is swapped. The right one is packed, whole.
struct ProductPlan {
  bool is_swapped;
  int64_t direct_blocks;  // so many blocks of the left factor are read where they are, and the others are packed
  int64_t packed_left, packed_right;  // numbers

  explicit ProductPlan(const MatrixProduct& args) {
    // To pack rows on the right, they have to be turned around: better the few. Where these are many, it is quicker
    // than to turn the result around.
    is_swapped = !args.b_has_columns && args.rows <= kFewLines && args.rows < args.columns;
    const int64_t left = is_swapped ? args.columns : args.rows, right = is_swapped ? args.rows : args.columns;
    const bool has_columns = is_swapped ? args.b_has_columns : args.a_has_columns;
    // Rows that are pages apart would all share a few sets of the first cache.
    const bool is_far = args.size * int64_t{sizeof(Bf16)} % 2048 == 0 && right > kBlockLines;
    direct_blocks = !has_columns && args.size % kTileSize == 0 && !is_far ? left / kBlockLines : 0;
    packed_left = (blocks_of(left) - direct_blocks) * steps_of(args.size) * 2 * kTileNumbers;
    packed_right = blocks_of(right) * steps_of(args.size) * 2 * kTileNumbers;
  }
};

}  // namespace
}  // namespace eqxcallback::cpu
