// The products of attention by tiles of bf16, where the processor has them, for heads of whole tiles. Two neighbours of
// what is summed over are a pair: features, keys or queries. Softmax weights and gradients of logits are sums of two
// bf16, the nearest one and that of the rest: rounded to one, they would double the error of what is computed from
// them. All numbers of f32 are sums of three, where their magnitudes allow that: see tile_packs.h.
#pragma once

#include "cpu/kernels/tile_packs.h"

namespace eqxcallback::cpu {
namespace {

// True if a prompt of T is attended to by tiles: its gradients are for bf16 alone, as there is more to split in them
// than is saved.
template <class T>
inline constexpr bool kByTiles = kHasTiles<Bf16> && (std::is_same_v<T, Bf16> || std::is_same_v<T, float>);
// True if its numbers are split into terms for that.
template <class T>
inline constexpr bool kIsSplit = kByTiles<T> && kTermsOf<T> == 3;
// The terms of pairs that are softmax weights or gradients of logits.
template <class T>
inline constexpr int kTermsOfPairs = kIsSplit<T> ? 3 : 2;

inline bool in_tiles(int64_t head_size) { return head_size > 0 && head_size % kTileSize == 0; }
// Fewer queries of f32 take the vectors less time than it takes to split keys and values.
inline constexpr int64_t kFewestSplit = 65;
template <class T>
bool attends_by_tiles(int64_t head_size, int64_t queries) {
  return kByTiles<T> && in_tiles(head_size) && (!kIsSplit<T> || queries >= kFewestSplit);
}

// The thread has tiles while it has this, if it multiplies T by them.
struct Nothing {};
template <class T>
using TilesFor = std::conditional_t<kByTiles<T>, Tiles, Nothing>;

// The rows of a left factor, `row` numbers apart, and the pairs of a right one, `row` floats apart. They have so many
// terms, each so much further on than the one before.
struct LeftRows {
  const Bf16* data;
  int64_t row, further;
  int terms;
};
struct RightPairs {
  float* data;
  int64_t row, further;
  int terms;
};

// The floats of memory that so many lines of `width` numbers take in all terms, as pairs of lines or as rows.
template <class T>
int64_t floats_of_terms(int64_t lines, int64_t width) {
  return kIsSplit<T> ? 3 * lines * width / 2 : 0;
}

// c = a b, or added to it, of 16 or 32 rows and columns. Rows of c are `width` floats apart. Of the products of terms
// those are summed that are not less than what the rounding of all terms leaves out, the low ones first.
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
  const Bf16* rows = a.data;
  const float* pairs = b.data;
  const auto left = [&](int term) {
    Tiles::load<4>(rows + term * a.further, 2 * a.row);
    if constexpr (kTwoRows) Tiles::load<5>(rows + term * a.further + kTileLines * a.row, 2 * a.row);
  };
  const auto right = [&](int term) {
    Tiles::load<6>(pairs + term * b.further, 4 * b.row);
    if constexpr (kTwoColumns) Tiles::load<7>(pairs + term * b.further + kTileLines, 4 * b.row);
  };
  const auto dot = [] {
    Tiles::dot<0, 4, 6>();
    if constexpr (kTwoColumns) Tiles::dot<1, 4, 7>();
    if constexpr (kTwoRows) Tiles::dot<2, 5, 6>();
    if constexpr (kTwoRows && kTwoColumns) Tiles::dot<3, 5, 7>();
  };
  for (int64_t i = 0; i < steps; ++i, rows += kTileSize, pairs += kTileLines * b.row) {
    // As few terms as can be are loaded twice.
    right(a.terms == 3 ? 0 : b.terms - 1), left(a.terms - 1), dot();
    if (a.terms == 3) left(1), dot(), right(1), dot(), left(0), dot(), right(2), dot();
    if (b.terms > 1) right(0), dot();
    if (a.terms == 2) left(0), dot();
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

template <bool kAdd>
void multiply_steps(float* c, int64_t width, int64_t rows, LeftRows a, const RightPairs& b, int64_t steps,
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
  const int64_t size = steps * kTileSize, of_term = kTileLines * size;
  Scratch scratch(a.terms * of_term / 2 + kTileLines * columns);
  auto* copied = reinterpret_cast<Bf16*>(scratch.data() + kTileLines * columns);
  std::memset(copied, 0, static_cast<size_t>(a.terms * of_term) * sizeof(Bf16));
  for (int t = 0; t < a.terms; ++t) {
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(copied + t * of_term + r * size, a.data + t * a.further + r * a.row,
                  static_cast<size_t>(size) * sizeof(Bf16));
    }
  }
  multiply_tile_rows<false, false>(scratch.data(), columns, {copied, size, of_term, a.terms}, b, steps, columns);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < columns; i += kLanes) {
      const F sums = Simd::load(scratch.data() + r * columns + i);
      float* to = c + r * width + i;
      Simd::store(to, kAdd ? Simd::add(Simd::load(to), sums) : sums);
    }
  }
}

// c = a b, or added to it: so many rows, and columns by the tile. So many steps at a time have their factors in the
// first cache.
template <bool kAdd>
void tile_product(float* c, int64_t width, int64_t rows, LeftRows a, RightPairs b, int64_t steps, int64_t columns) {
  constexpr int64_t kDepth = 2;
  multiply_steps<kAdd>(c, width, rows, a, b, smaller(steps, kDepth), columns);
  for (int64_t i = kDepth; i < steps; i += kDepth) {
    a.data += kDepth * kTileSize, b.data += kDepth * kTileLines * b.row;
    multiply_steps<true>(c, width, rows, a, b, smaller(steps - i, kDepth), columns);
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

// Where lines of `width` floats are put as pairs of neighbouring lines, the terms of a pair one after the other. Two of
// them may take the lines that they are made of.
template <class T>
RightPairs pairs_of_lines(float* memory, int64_t width) {
  return {memory, kTermsOfPairs<T> * width, width, kTermsOfPairs<T>};
}

// Splits so many lines into these pairs, with zeros up to a whole tile. Returns the highest magnitude of f32.
template <class T, class S = Simd>
float split_into_pairs(const RightPairs& to, const float* lines, int64_t count, int64_t width) {
  Highest highest;
  for (int64_t j = 0; j < steps_of(count) * kTileSize; j += 2) {
    for (int64_t i = 0; i < width; i += kLanes) {
      const float* line = lines + j * width + i;
      const F first = j < count ? S::load(line) : S::zero(), second = j + 1 < count ? S::load(line + width) : S::zero();
      if (kIsSplit<T>) highest.see(first), highest.see(second);
      put_pairs<kTermsOfPairs<T>, S>(to.data + j / 2 * to.row + i, to.further, first, second);
    }
  }
  return highest.magnitude();
}

// Rows of a head are far apart, so that no processor sees what comes next.
inline constexpr int64_t kAhead = 16;

// Splits rows into terms, [rows, 3, size], and returns the highest magnitude.
[[maybe_unused]] float split_rows(Bf16* out, const float* x, int64_t stride, int64_t rows, int64_t size) {
  Highest highest;
  for (int64_t r = 0; r < rows; ++r) {
    prefetch<3>(x + (r + kAhead) * stride, size);
    for (int64_t i = 0; i < size; i += kLanes) {
      const F numbers = Simd::load(x + r * stride + i);
      highest.see(numbers);
      put_terms(out + r * 3 * size + i, size, numbers);
    }
  }
  return highest.magnitude();
}

// Splits columns into terms: out[d, t, j] = the term t of x[j, d], in rows of `width` numbers, with zeros up to a whole
// tile.
[[maybe_unused]] float split_transposed(Bf16* out, int64_t width, const float* x, int64_t stride, int64_t rows,
                                        int64_t size) {
  Highest highest;
  for (int64_t j = 0; j < steps_of(rows) * kTileSize; j += kLanes) {
    for (int64_t d = 0; d < size; d += kLanes) {
      F tile[kLanes];
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) {
        prefetch<3>(x + (j + r + kAhead) * stride + d, 1);
        tile[r] = j + r < rows ? Simd::load(x + (j + r) * stride + d) : Simd::zero();
        highest.see(tile[r]);
      }
      Simd::transpose(tile);
#pragma GCC unroll 16
      for (int c = 0; c < kLanes; ++c) put_terms(out + (d + c) * 3 * width + j, width, tile[c]);
    }
  }
  return highest.magnitude();
}

// Splits the floats of each line, in its memory, into rows of two terms.
LeftRows split_lines(float* lines, int64_t count, int64_t width) {
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
  return {reinterpret_cast<const Bf16*>(lines), 2 * width, width, 2};
}

}  // namespace
}  // namespace eqxcallback::cpu
