// How products by tiles take their factors, which says how much memory they need beside them.
#pragma once

#include "cpu/kernels.h"

namespace eqxcallback::cpu {
namespace {

// A tile has 16 lines of 32 numbers, along which a product sums: rows or columns of a factor. Two tiles are a block.
inline constexpr int64_t kTileLines = 16, kTileSize = 32, kTileNumbers = kTileLines * kTileSize;
inline constexpr int64_t kBlockLines = 2 * kTileLines, kFewLines = 8 * kBlockLines;
// Blocks along one side of a part of the result: its operands and sums have room in a second cache of 1 MiB.
inline constexpr int64_t kPartBlocks = 8;

inline int64_t blocks_of(int64_t lines) { return (lines + kBlockLines - 1) / kBlockLines; }
inline int64_t steps_of(int64_t size) { return (size + kTileSize - 1) / kTileSize; }

// One factor is on the left, with the rows of the result, unless it is swapped. Both are packed a group of blocks at a
// time, and f32 so many steps at a time, so that this takes little memory.
struct TileProductPlan {
  bool is_swapped;
  bool is_direct;                           // whole blocks of the left factor are read where they are
  int64_t left_group, right_group, packed;  // blocks: of a group, and so many of the left one are packed
  int64_t depth;                            // steps
  int64_t numbers;                          // of bf16 in a packed block

  explicit TileProductPlan(const MatrixProduct& args) {
    const bool is_narrow = args.element == Element::kBf16;
    // To pack rows on the right, they have to be turned around: better the few. Where these are many, it is quicker
    // than to turn the result around.
    is_swapped = !args.b_has_columns && args.rows <= kFewLines && args.rows < args.columns;
    const int64_t left = is_swapped ? args.columns : args.rows, right = is_swapped ? args.rows : args.columns;
    const bool has_columns = is_swapped ? args.b_has_columns : args.a_has_columns;
    // Rows that are pages apart would all share a few sets of the first cache.
    const bool is_far = args.size * int64_t{sizeof(Bf16)} % 2048 == 0 && right > kBlockLines;
    is_direct = is_narrow && !has_columns && args.size % kTileSize == 0 && !is_far;
    // Sums of several depths are added where the result is, which has to be f32 for that.
    const int64_t steps = larger<int64_t>(1, steps_of(args.size));
    depth = is_narrow ? steps : smaller<int64_t>(steps, 2048 / kTileSize);
    numbers = depth * (is_narrow ? 1 : 3) * 2 * kTileNumbers;
    const int64_t most = larger(kPartBlocks, kGroupNumbers / numbers);
    left_group = is_direct ? blocks_of(left) : smaller(blocks_of(left), most);
    right_group = smaller(blocks_of(right), most);
    packed = is_direct ? 1 : left_group;
  }

  // With the highest magnitude of each block.
  int64_t bytes() const { return (packed + right_group) * (numbers * int64_t{sizeof(Bf16)} + int64_t{sizeof(float)}); }

 private:
  static constexpr int64_t kGroupNumbers = int64_t{1} << 23;
};

}  // namespace
}  // namespace eqxcallback::cpu
