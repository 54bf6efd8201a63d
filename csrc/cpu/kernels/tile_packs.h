// Matrices as tiles of bf16, two of which are a block of 32 lines: those of a left factor have rows of 16 pairs, and
// those of a right one have pairs in rows, a pair for each column. Numbers past the end are zero.
//
// A number is the sum of its terms: bf16 has one, itself, and f32 three, the nearest bf16, that of the rest, and that
// of what is left then, which is nothing.
#pragma once

#include "cpu/kernels/matrix_factors.h"
#include "cpu/kernels/tile_plan.h"
#if !defined(EQXCALLBACK_TILES) || defined(EQXCALLBACK_EMULATED_TILES)
#include "cpu/simd/tiles.h"
#endif

namespace eqxcallback::cpu {
namespace {

static_assert(kTileLines == Tiles::kRows && kTileSize == 2 * Tiles::kPairs);

template <class T>
inline constexpr int kTermsOf = std::is_same_v<T, Bf16> ? 1 : 3;

// Highest magnitudes of blocks whose products are those of their terms. What is higher may overflow in one of them and
// not in all, and what is lower has terms that count as zero.
inline constexpr float kHighestOfTerms = 0x1p50f, kLowestOfTerms = 0x1p-80f;
inline bool has_terms(float magnitude) {
  return magnitude == 0 || (magnitude >= kLowestOfTerms && magnitude <= kHighestOfTerms);
}

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
template <class S = Simd>
void pair_rows(Bf16* out, const Bf16* first, const Bf16* second) {
  for (int64_t i = 0; i < kTileLines; i += kLanes) store_pairs(out + 2 * i, S::pairs(first + i, second + i));
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

// The numbers of a tile where they are, or copied, with zeros past the end.
template <class T>
struct TileNumbers {
  const T* data;
  int64_t stride;
};
template <class T>
TileNumbers<T> numbers_of_tile(T (&copied)[kTileNumbers], const FactorLines<T>& from, int64_t line, int64_t at) {
  const int64_t lines = larger<int64_t>(0, smaller(kTileLines, from.count - line));
  const int64_t numbers = smaller(kTileSize, from.size - at);
  const T* x = from.data + (from.are_columns ? at * from.stride + line : line * from.stride + at);
  if (lines == kTileLines && numbers == kTileSize) return {x, from.stride};
  std::memset(copied, 0, sizeof(copied));
  const int64_t rows = from.are_columns ? numbers : lines, columns = from.are_columns ? lines : numbers;
  const int64_t padded = from.are_columns ? kTileLines : kTileSize;
  for (int64_t i = 0; i < rows && columns > 0; ++i) {
    std::memcpy(copied + i * padded, x + i * from.stride, static_cast<size_t>(columns) * sizeof(T));
  }
  return {copied, padded};
}

// The highest magnitude of what it has seen: infinity if a number is not finite.
class Highest {
 public:
  void see(F x) {
    highest_ = Simd::max(highest_, Simd::abs(x));
    times_zero_ = Simd::fma(x, Simd::zero(), times_zero_);
  }
  float magnitude() const { return Simd::sum(times_zero_) == 0 ? Simd::maximum(highest_) : __builtin_inff(); }

 private:
  F highest_ = Simd::zero(), times_zero_ = Simd::zero();
};

// Puts the terms of a vector there, each so much further on than the one before.
inline void put_terms(Bf16* terms, int64_t further, F rest) {
#pragma GCC unroll 3
  for (int t = 0; t < kTermsOf<float>; ++t) {
    Simd::store(terms + t * further, rest);
    rest = Simd::sub(rest, Simd::load(terms + t * further));
  }
}

// Splits 16 rows of 32 numbers into terms, of kTileNumbers each, the first of which are at `terms`, and the others so
// much further on.
float split_rows_of_tile(Bf16* terms, int64_t further, const TileNumbers<float>& x) {
  Highest highest;
  for (int64_t r = 0; r < kTileLines; ++r) {
    for (int64_t i = 0; i < kTileSize; i += kLanes) {
      const F numbers = Simd::load(x.data + r * x.stride + i);
      highest.see(numbers);
      put_terms(terms + r * kTileSize + i, further, numbers);
    }
  }
  return highest.magnitude();
}

// Puts so many terms of two vectors there, in pairs, each so many floats further on than the one before.
template <int kTerms, class S = Simd>
void put_pairs(float* to, int64_t further, F first, F second) {
#pragma GCC unroll 3
  for (int t = 0; t < kTerms; ++t) {
    const F pairs = S::pairs(first, second);
    S::store(to + t * further, pairs);
    first = S::sub(first, S::first_of_pairs(pairs)), second = S::sub(second, S::second_of_pairs(pairs));
  }
}

// Splits 32 rows of 16 numbers in the same way, into pairs of neighbouring rows.
template <class S = Simd>
float split_columns(Bf16* terms, int64_t further, const TileNumbers<float>& x) {
  Highest highest;
  for (int64_t p = 0; p < Tiles::kPairs; ++p) {
    for (int64_t i = 0; i < kTileLines; i += kLanes) {
      const float* row = x.data + 2 * p * x.stride + i;
      const F first = Simd::load(row), second = Simd::load(row + x.stride);
      highest.see(first), highest.see(second);
      put_pairs<3, S>(reinterpret_cast<float*>(terms + p * kTileSize + 2 * i), further / 2, first, second);
    }
  }
  return highest.magnitude();
}

// Packs the tile of the lines from `line` on, and their numbers from `at` on. Its terms are two tiles apart. Returns
// the highest magnitude of f32.
template <bool kIsRight>
float pack_tile(Bf16* out, const FactorLines<Bf16>& from, int64_t line, int64_t at) {
  alignas(64) Bf16 copied[kTileNumbers];
  const TileNumbers<Bf16> x = numbers_of_tile(copied, from, line, at);
  pack_whole_tile<kIsRight>(out, x.data, x.stride, from.are_columns);
  return 0;
}
template <bool kIsRight>
float pack_tile(Bf16* out, const FactorLines<float>& from, int64_t line, int64_t at) {
  alignas(64) float copied[kTileNumbers];
  const TileNumbers<float> x = numbers_of_tile(copied, from, line, at);
  constexpr int64_t kFurther = 2 * kTileNumbers;
  if (kIsRight == from.are_columns) {
    return kIsRight ? split_columns(out, kFurther, x) : split_rows_of_tile(out, kFurther, x);
  }
  alignas(64) Bf16 terms[kTermsOf<float> * kTileNumbers];
  const float highest = kIsRight ? split_rows_of_tile(terms, kTileNumbers, x) : split_columns(terms, kTileNumbers, x);
  for (int t = 0; t < kTermsOf<float>; ++t) transpose_pairs(out + t * kFurther, terms + t * kTileNumbers, kTileSize);
  return highest;
}

// Packs blocks of lines, of each block and each step the terms, two tiles each, and sets the highest magnitudes of
// blocks. The matrix is read along its rows.
template <bool kIsRight, class T>
void pack_blocks(Bf16* out, float* highest, const FactorLines<T>& from, int64_t begin, int64_t end) {
  const int64_t steps = steps_of(from.size);
  const auto pack = [&](int64_t block, int64_t step) {
    Bf16* to = out + (block * steps + step) * kTermsOf<T> * 2 * kTileNumbers;
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t line = block * kBlockLines + half * kTileLines;
      const float of_tile = pack_tile<kIsRight>(to + half * kTileNumbers, from, line, step * kTileSize);
      highest[block] = larger(highest[block], of_tile);
    }
  };
  for (int64_t block = begin; block < end; ++block) highest[block] = 0;
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
