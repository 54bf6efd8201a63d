// Dot products of rows: of f32 with rows that are widened in registers, or of bf16 if the processor multiplies bf16.
#pragma once

#include "cpu/kernels/common.h"

namespace eqxcallback::cpu {
namespace {

// The vectors of both rows, which `Simd::fma` multiplies.
template <class X, class W>
struct Terms {
  static constexpr int kStep = kLanes;
  template <class T, class Count>
  static F load(const T* p, Count count) {
    return cpu::load(p, count);
  }
};
#ifdef EQXCALLBACK_PAIRS
template <>
struct Terms<Bf16, Bf16> {
  static constexpr int kStep = 2 * kLanes;
  static auto load(const Bf16* p, Full) { return Simd::load_pairs(p); }
  static auto load(const Bf16* p, int n) { return Simd::load_pairs(p, n); }
};
#endif

// The type that rows of W are multiplied with: f32, unless the processor multiplies W without widening.
template <class W>
using Factor = std::conditional_t<kHasPairs<W>, W, float>;

// Returns `n` elements of x in their own memory, or widened into `buffer`.
template <class W, class T>
const Factor<W>* as_factors(const T* x, int64_t n, float* buffer) {
  if constexpr (std::is_same_v<Factor<W>, T>) {
    return x;
  } else {
    for_vectors(n, [&](int64_t i, auto count) { store(buffer + i, load(x + i, count), count); });
    return buffer;
  }
}

// Where `dots` prefetches, in bytes after each of the rows: from `begin` on, `step` for each vector.
struct Ahead {
  int64_t begin, step;
};

// Computes sums[r * stride + w], whose lanes are still to be added, of row r of x, whose rows are `x_stride` apart, and
// rows[w].
//
// Never inlined: among other loops, the compiler would keep the sums in memory.
template <int kRows, int kWeights, bool kAhead = false, class X, class T>
[[gnu::noinline]] void dots(F* sums, int stride, const X* x, int64_t x_stride, const T* const* rows, int64_t size,
                            Ahead ahead = {}) {
  using Each = Terms<X, T>;
  F acc[kRows][kWeights];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int w = 0; w < kWeights; ++w) acc[r][w] = Simd::zero();
  }
  for_vectors<Each::kStep>(size, [&](int64_t i, auto count) {
    decltype(Each::load(x, count)) values[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) values[r] = Each::load(x + r * x_stride + i, count);
#pragma GCC unroll 8
    for (int w = 0; w < kWeights; ++w) {
      const auto v = Each::load(rows[w] + i, count);
      if constexpr (kRows == 1 && kAhead) prefetch_stream(rows[w] + i);
      if constexpr (kRows > 1 && kAhead) prefetch(reinterpret_cast<const char*>(rows[w]) + ahead.begin, 1);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) acc[r][w] = Simd::fma(values[r], v, acc[r][w]);
    }
    ahead.begin += ahead.step;
  });
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int w = 0; w < kWeights; ++w) sums[r * stride + w] = acc[r][w];
  }
}

// A tile multiplies so many rows of weights.
inline constexpr int kTileWeights = 4;

// True if memory would be idle in all passes but the first, which multiply some rows of x with a tile of weights, and
// the tile that comes next leaves room for x in the caches. Then each pass prefetches a share of it.
template <class T>
bool all_prefetch(int64_t passes, int64_t size, const Prefetching& prefetching) {
  return passes > 1 && size > 0 && size * int64_t{sizeof(T)} <= prefetching.longest_row;
}

// True if tiles follow each other in memory where all passes prefetch, 8 KiB ahead or more. With few registers, passes
// are so many that a shorter way is enough.
inline constexpr bool kPrefetchesFar = kManyRegisters;

// Where a pass prefetches. If only the first one does, it reads memory, and the processor sees that coming, but not
// soon enough.
template <class X, class T>
Ahead ahead_of(int64_t pass, int64_t passes, int64_t size, const Prefetching& prefetching) {
  constexpr int64_t kAhead = 2048, kFar = 8192, kBytes = Terms<X, T>::kStep * int64_t{sizeof(T)};
  if (!all_prefetch<T>(passes, size, prefetching)) return pass == 0 ? Ahead{kAhead, kBytes} : Ahead{0, 0};
  const int64_t bytes = size * int64_t{sizeof(T)}, tile = kTileWeights * bytes;
  const int64_t distance = kPrefetchesFar ? (kFar + tile - 1) / tile * tile : bytes + kAhead;
  return {distance + pass * bytes / passes, (kBytes + passes - 1) / passes};
}

// Calls body(Int<n>{}), for n from 1 to kMost.
template <int kMost, class Body>
void with_count(int64_t n, const Body& body) {
  if constexpr (kMost > 1) {
    if (n < kMost) return with_count<kMost - 1>(n, body);
  }
  body(Int<kMost>{});
}

// Calls put(r, o, sum) for the rows of x and of weights, which are `size` apart and read once.
template <class X, class T, class Put>
void few_rows(const X* x, int64_t num_rows, int64_t x_stride, const T* weights, int64_t begin, int64_t end,
              int64_t size, const Prefetching& prefetching, const Put& put) {
  constexpr int kMost = kManyRegisters ? 6 : 2;
  const int64_t passes = (num_rows + kMost - 1) / kMost;
  // Multiplies so many tiles, whose first rows are `step` apart, each of rows that are `part` apart.
  const auto columns = [&](auto num_w, int64_t first, int64_t tiles, int64_t step, int64_t part) {
    constexpr int kWeights = decltype(num_w)::value;
    for (int64_t o = first; o < first + tiles * step; o += step) {
      const T* rows[kWeights];
      for (int w = 0; w < kWeights; ++w) rows[w] = weights + (o + w * part) * size;
      int64_t r = 0;
      for (int64_t pass = 0; pass < passes; ++pass) {
        const int64_t n = (num_rows - r) / (passes - pass);  // the same for all, or one more
        with_count<kMost>(n, [&](auto num_x) {
          constexpr int kRows = decltype(num_x)::value, kSums = kRows * kWeights, kPadded = kWhole<kSums>;
          F sums[kPadded];
          dots<kRows, kWeights, true>(sums, kWeights, x + r * x_stride, x_stride, rows, size,
                                      ahead_of<X, T>(pass, passes, size, prefetching));
          for (int i = kSums; i < kPadded; ++i) sums[i] = Simd::zero();
          float totals[kPadded];
          for (int i = 0; i < kPadded; i += kLanes) Simd::store(totals + i, Simd::sums(sums + i));
          for (int i = 0; i < kRows; ++i) {
            for (int w = 0; w < kWeights; ++w) put(r + i, o + w * part, totals[i * kWeights + w]);
          }
        });
        r += n;
      }
    }
  };
  const int64_t tiles = (end - begin) / kTileWeights, rest = begin + tiles * kTileWeights;
  if (kPrefetchesFar && all_prefetch<T>(passes, size, prefetching)) {
    columns(Int<kTileWeights>{}, begin, tiles, kTileWeights, 1);
  } else {
    // A tile has the rows o, o + tiles, and so on; the next tile has the rows after them. These are long streams, which
    // the processor sees coming; neighbouring rows would be many short ones.
    columns(Int<kTileWeights>{}, begin, tiles, 1, tiles);
  }
  columns(Int<1>{}, rest, end - rest, 1, 1);
}

}  // namespace
}  // namespace eqxcallback::cpu
