// Matrices of bf16 as tiles, two of which are a block of 32 lines: those of a left factor have rows of 16 pairs, and
// those of a right one have pairs in rows, a pair for each column. Numbers past the end are zero.
#pragma once

#include "cpu/kernels/common.h"
#include "cpu/product_plan.h"
#if !defined(EQXCALLBACK_TILES) || defined(EQXCALLBACK_EMULATED_TILES)
#include "cpu/simd/tiles.h"
#endif

namespace eqxcallback::cpu {
namespace {

static_assert(kTileLines == Tiles::kRows && kTileSize == 2 * Tiles::kPairs);

// The rows of a matrix, or its columns, along which a product sums.
struct FactorLines {
  const Bf16* data;
  int64_t count, size;
  bool are_columns;  // the matrix is [size, count]
};

// A vector of pairs, as f32.
F load_pairs(const Bf16* p) {
  float lanes[kLanes];
  std::memcpy(lanes, p, sizeof(lanes));
  return Simd::load(lanes);
}
void store_pairs(Bf16* p, F x) {
  float lanes[kLanes];
  Simd::store(lanes, x);
  std::memcpy(p, lanes, sizeof(lanes));
}

// Swaps rows and columns of 16 x 16 pairs, whose rows are `stride` numbers apart.
void transpose_pairs(Bf16* out, const Bf16* x, int64_t stride) {
#pragma GCC unroll 4
  for (int64_t i = 0; i < kTileLines; i += kLanes) {
#pragma GCC unroll 4
    for (int64_t j = 0; j < kTileLines; j += kLanes) {
      F tile[kLanes];
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) tile[r] = load_pairs(x + (i + r) * stride + 2 * j);
      Simd::transpose(tile);
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) store_pairs(out + (j + r) * kTileSize + 2 * i, tile[r]);
    }
  }
}

// Puts two rows of 16 numbers into pairs of neighbours.
void pair_rows(Bf16* out, const Bf16* first, const Bf16* second) {
  for (int64_t i = 0; i < kTileLines; ++i) out[2 * i] = first[i], out[2 * i + 1] = second[i];
}

// Packs one tile of 16 lines and 32 numbers of each, which are all there.
template <bool kIsRight>
void pack_whole_tile(Bf16* out, const Bf16* x, int64_t stride, bool are_columns) {
  if (!are_columns) {
    if (kIsRight) return transpose_pairs(out, x, stride);
    for (int64_t i = 0; i < kTileLines; ++i) {
      std::memcpy(out + i * kTileSize, x + i * stride, kTileSize * sizeof(Bf16));
    }
    return;
  }
  alignas(64) Bf16 paired[kTileNumbers];
  Bf16* to = kIsRight ? out : paired;
  for (int64_t i = 0; i < Tiles::kPairs; ++i) {
    pair_rows(to + i * kTileSize, x + 2 * i * stride, x + (2 * i + 1) * stride);
  }
  if (!kIsRight) transpose_pairs(out, paired, kTileSize);
}

// Packs the tile of the lines from `line` on, and their numbers from `at` on.
template <bool kIsRight>
void pack_tile(Bf16* out, const FactorLines& from, int64_t line, int64_t at) {
  const int64_t lines = larger<int64_t>(0, smaller(kTileLines, from.count - line));
  const int64_t numbers = smaller(kTileSize, from.size - at), stride = from.are_columns ? from.count : from.size;
  const Bf16* x = from.data + (from.are_columns ? at * stride + line : line * stride + at);
  const bool is_whole = lines == kTileLines && numbers == kTileSize;
  if (is_whole) return pack_whole_tile<kIsRight>(out, x, stride, from.are_columns);
  alignas(64) Bf16 copied[kTileNumbers];
  std::memset(copied, 0, sizeof(copied));
  const int64_t rows = from.are_columns ? numbers : lines, columns = from.are_columns ? lines : numbers;
  const int64_t padded = from.are_columns ? kTileLines : kTileSize;
  for (int64_t i = 0; i < rows && columns > 0; ++i) {
    std::memcpy(copied + i * padded, x + i * stride, static_cast<size_t>(columns) * sizeof(Bf16));
  }
  pack_whole_tile<kIsRight>(out, copied, padded, from.are_columns);
}

// Packs blocks of lines: of each block and each step, two tiles. Block 0 is block `first` of the matrix, which is read
// along its rows.
template <bool kIsRight>
void pack_blocks(Bf16* out, const FactorLines& from, int64_t first, int64_t begin, int64_t end) {
  const int64_t steps = steps_of(from.size);
  const auto pack = [&](int64_t block, int64_t step) {
    Bf16* to = out + (block * steps + step) * 2 * kTileNumbers;
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t line = (first + block) * kBlockLines + half * kTileLines;
      pack_tile<kIsRight>(to + half * kTileNumbers, from, line, step * kTileSize);
    }
  };
  if (from.are_columns) {
    for (int64_t step = 0; step < steps; ++step) {
      for (int64_t block = begin; block < end; ++block) pack(block, step);
    }
  } else {
    for (int64_t block = begin; block < end; ++block) {
      for (int64_t step = 0; step < steps; ++step) pack(block, step);
    }
  }
}

}  // namespace
}  // namespace eqxcallback::cpu
