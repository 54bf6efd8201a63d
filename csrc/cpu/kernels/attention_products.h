// The products of attention by tiles of bf16, where the processor has them, for heads of whole tiles. Two neighbours of
// what is summed over are a pair: features, keys or queries. Softmax weights and gradients of logits are sums of two
// bf16, the nearest one and that of the rest: rounded to one, they would double the error of what is computed from
// them.
#pragma once

#include "cpu/kernels/tile_packs.h"

namespace eqxcallback::cpu {
namespace {

template <class T>
bool in_tiles(int64_t head_size) {
  return kHasTiles<T> && head_size > 0 && head_size % kTileSize == 0;
}

// The thread has tiles while it has this, if it multiplies T by them.
struct Nothing {};
template <class T>
using TilesFor = std::conditional_t<kHasTiles<T>, Tiles, Nothing>;

// The rows of a left factor, `row` numbers apart, and the pairs of a right one, `row` floats apart. A factor that has
// two parts has its low one so much further on, and one that has not has 0 there.
struct LeftRows {
  const Bf16* data;
  int64_t row, low;
};
struct RightPairs {
  const float* data;
  int64_t row, low;
};

// c = a b, or added to it, of 16 or 32 rows and columns. Rows of c are `width` floats apart.
template <bool kAdd, bool kTwoRows, bool kTwoColumns>
void multiply_tiles(float* c, int64_t width, const LeftRows& a, const RightPairs& b, int64_t steps) {
  const auto for_sums = [&](const auto& body) {
    body(Int<0>{}, c);
    if constexpr (kTwoColumns) body(Int<1>{}, c + kTileLines);
    if constexpr (kTwoRows) body(Int<2>{}, c + kTileLines * width);
    if constexpr (kTwoRows && kTwoColumns) body(Int<3>{}, c + kTileLines * (width + 1));
  };
  for_sums([&](auto tile, float* at) {
    constexpr int kTile = decltype(tile)::value;
    kAdd ? Tiles::load<kTile>(at, 4 * width) : Tiles::zero<kTile>();
  });
  for (int part = 0; part < (a.low == 0 && b.low == 0 ? 1 : 2); ++part) {
    const Bf16* rows = a.data + part * a.low;
    const float* pairs = b.data + part * b.low;
    for (int64_t i = 0; i < steps; ++i, rows += kTileSize, pairs += kTileLines * b.row) {
      Tiles::load<4>(rows, 2 * a.row);
      Tiles::load<6>(pairs, 4 * b.row);
      Tiles::dot<0, 4, 6>();
      if constexpr (kTwoColumns) Tiles::load<7>(pairs + kTileLines, 4 * b.row), Tiles::dot<1, 4, 7>();
      if constexpr (kTwoRows) Tiles::load<5>(rows + kTileLines * a.row, 2 * a.row), Tiles::dot<2, 5, 6>();
      if constexpr (kTwoRows && kTwoColumns) Tiles::dot<3, 5, 7>();
    }
  }
  for_sums([&](auto tile, float* at) { Tiles::store<decltype(tile)::value>(at, 4 * width); });
}

template <bool kAdd, bool kTwoRows>
void multiply_tile_rows(float* c, int64_t width, const LeftRows& a, RightPairs b, int64_t steps, int64_t columns) {
  int64_t i = 0;
  for (; i + 2 * kTileLines <= columns; i += 2 * kTileLines, b.data += 2 * kTileLines) {
    multiply_tiles<kAdd, kTwoRows, true>(c + i, width, a, b, steps);
  }
  if (i < columns) multiply_tiles<kAdd, kTwoRows, false>(c + i, width, a, b, steps);
}

// c = a b, or added to it: so many rows, and columns by the tile.
template <bool kAdd>
void tile_product(float* c, int64_t width, int64_t rows, LeftRows a, const RightPairs& b, int64_t steps,
                  int64_t columns) {
  for (; rows >= 2 * kTileLines; rows -= 2 * kTileLines) {
    multiply_tile_rows<kAdd, true>(c, width, a, b, steps, columns);
    c += 2 * kTileLines * width, a.data += 2 * kTileLines * a.row;
  }
  for (; rows >= kTileLines; rows -= kTileLines) {
    multiply_tile_rows<kAdd, false>(c, width, a, b, steps, columns);
    c += kTileLines * width, a.data += kTileLines * a.row;
  }
  if (rows == 0) return;
  // The last rows are copied, as an array may end there.
  constexpr int64_t kParts = 2;
  const int64_t size = steps * kTileSize;
  Scratch scratch(kTileLines * (kParts * size / 2 + columns));
  auto* copied = reinterpret_cast<Bf16*>(scratch.data() + kTileLines * columns);
  std::memset(copied, 0, static_cast<size_t>(kTileLines * kParts * size) * sizeof(Bf16));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t part = 0; part < (a.low == 0 ? 1 : kParts); ++part) {
      std::memcpy(copied + (r * kParts + part) * size, a.data + r * a.row + part * a.low,
                  static_cast<size_t>(size) * sizeof(Bf16));
    }
  }
  const LeftRows last{copied, kParts * size, a.low == 0 ? 0 : size};
  multiply_tile_rows<false, false>(scratch.data(), columns, last, b, steps, columns);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < columns; i += kLanes) {
      const F sums = Simd::load(scratch.data() + r * columns + i);
      float* to = c + r * width + i;
      Simd::store(to, kAdd ? Simd::add(Simd::load(to), sums) : sums);
    }
  }
}

// The vector of pairs that row `pair` and the next one of 2 * rows have from x on.
template <class S = Simd>
F pairs_of_rows(const Bf16* x, int64_t stride, int64_t row, int64_t rows) {
  static const Bf16 zeros[kTileLines] = {};
  if (row >= rows) return S::zero();
  return S::pairs(x + row * stride, row + 1 < rows ? x + (row + 1) * stride : zeros);
}

// out[d, j] = x[j, d], in rows of `width` numbers.
template <class S = Simd>
void transpose_rows(Bf16* out, int64_t width, const Bf16* x, int64_t stride, int64_t rows, int64_t size) {
  for (int64_t j = 0; j < rows; j += kTileSize) {
    for (int64_t d = 0; d < size; d += kTileLines) {
      F tile[kLanes];
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) tile[r] = pairs_of_rows<S>(x + d, stride, j + 2 * r, rows);
      S::transpose(tile);
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) S::store(reinterpret_cast<float*>(out + (d + r) * width + j), tile[r]);
    }
  }
}

// out[p, d] = the pair x[2 p, d], x[2 p + 1, d], for `padded` rows of x.
template <class S = Simd>
void pair_rows(float* out, const Bf16* x, int64_t stride, int64_t rows, int64_t padded, int64_t size) {
  for (int64_t j = 0; j < padded; j += 2) {
    for (int64_t d = 0; d < size; d += kLanes)
      S::store(out + j / 2 * size + d, pairs_of_rows<S>(x + d, stride, j, rows));
  }
}

// Puts pairs of two vectors into the line of the first one, and those of what is left of them into the next line.
template <class S = Simd>
void store_split(float* line, int64_t width, F first, F second) {
  const F pairs = S::pairs(first, second);
  S::store(line, pairs);
  S::store(line + width, S::pairs(S::sub(first, S::first_of_pairs(pairs)), S::sub(second, S::second_of_pairs(pairs))));
}

// Splits lines of `width` floats, of which so many count, into pairs of neighbouring lines. `out` may be where they
// are.
template <class S = Simd>
void split_into_pairs(float* out, const float* lines, int64_t count, int64_t width) {
  for (int64_t j = 0; j < steps_of(count) * kTileSize; j += 2) {
    for (int64_t i = 0; i < width; i += kLanes) {
      const float* line = lines + j * width + i;
      const F first = j < count ? S::load(line) : S::zero(), second = j + 1 < count ? S::load(line + width) : S::zero();
      store_split<S>(out + j * width + i, width, first, second);
    }
  }
}
// The pairs that it has put there.
RightPairs split_pairs(const float* lines, int64_t width) { return {lines, 2 * width, width}; }

// Splits the floats of each line, in its memory, into rows.
void split_lines(float* lines, int64_t count, int64_t width) {
  for (int64_t j = 0; j < count; ++j) {
    float* line = lines + j * width;
    auto* narrow = reinterpret_cast<Bf16*>(line);
    F numbers[kTileLines];
    for (int64_t i = 0; i < width; i += kLanes) numbers[i / kLanes] = Simd::load(line + i);
    for (int64_t i = 0; i < width; i += kLanes) {
      Simd::store(narrow + i, numbers[i / kLanes]);
      Simd::store(narrow + width + i, Simd::sub(numbers[i / kLanes], Simd::load(narrow + i)));
    }
  }
}
// The rows that it has put there.
LeftRows split_rows(const float* lines, int64_t width) {
  return {reinterpret_cast<const Bf16*>(lines), 2 * width, width};
}

}  // namespace
}  // namespace eqxcallback::cpu
