// Few rows of x times many rows of weights, each of which is read once.
#pragma once

#include "cpu/kernels/dots.h"

namespace eqxcallback::cpu {
namespace {

// A tile multiplies so many rows of weights.
inline constexpr int kTileWeights = 4;
// The most rows of x of a pass over a tile.
inline constexpr int kPassRows = kManyRegisters ? 6 : 2;

// How `FewRows` takes some rows of `size` weights, in so many passes for rows of x.
template <class X, class T>
class FewRowsPlan {
 public:
  int64_t passes;
  int64_t part;   // numbers of x and of weights that are multiplied at a time
  int64_t tiles;  // so many share a part of x

  FewRowsPlan(int64_t num_rows, int64_t size, const Prefetching& prefetching)
      : passes((num_rows + kPassRows - 1) / kPassRows), part(size), tiles(1) {
    const int64_t bytes = size * int64_t{sizeof(T)}, tile = kTileWeights * bytes;
    const auto whole_tiles = [&](int64_t n) { return (n + tile - 1) / tile * tile; };
    if (num_rows == 0 || size == 0) return;
    share_ = (kBytes + passes - 1) / passes;
    if (prefers_first_cache(prefetching) && (2 * num_rows + 2 * kTileWeights) * bytes <= kMostBytes) {
      order_ = Order::kMemory, begin_ = whole_tiles(kNear), of_pass_ = tile / passes;
    } else if (passes > 1 && bytes <= prefetching.longest_row) {
      order_ = Order::kTiles, begin_ = kManyRegisters ? whole_tiles(kFar) : bytes + kAhead, of_pass_ = bytes / passes;
    } else if (passes > 1 && num_rows <= kMostRowsOfParts && prefers_first_cache(prefetching)) {
      const int64_t most = larger<int64_t>(kLeastPart, kPartBytes / (num_rows * int64_t{sizeof(X)})),
                    parts = (size + most - 1) / most;
      part = ((size + parts - 1) / parts + kStep - 1) / kStep * kStep, tiles = 4;
      order_ = Order::kParts, begin_ = part * int64_t{sizeof(T)}, of_pass_ = begin_ / passes;
    } else if (num_rows == 1) {
      begin_ = 2 * kAhead;
    }
  }

  bool has_parts() const { return order_ == Order::kParts; }
  // True if tiles have to follow each other in memory. With few registers, passes are so many that a shorter way than
  // to a later tile is enough.
  bool has_neighbours() const {
    return order_ == Order::kMemory || has_parts() || (order_ == Order::kTiles && kManyRegisters);
  }

  // What a pass prefetches over a tile of rows that are so many bytes apart, from number i of each on.
  Ahead ahead(int64_t pass, int64_t apart, int64_t i) const {
    if (order_ == Order::kMemory) return {begin_ + pass * of_pass_, kTileWeights * share_, share_};
    if (order_ == Order::kTiles) return {begin_ + pass * of_pass_, share_, apart};
    if (order_ == Order::kRows) return pass == 0 ? Ahead{begin_, kBytes, apart} : Ahead{0, 0, 0};
    const int64_t done = i * int64_t{sizeof(T)},
                  next = done + begin_ < apart ? begin_ : tiles * kTileWeights * apart - done;
    return {next + pass * of_pass_, share_, apart};
  }

 private:
  enum class Order : uint8_t {
    kRows,    // the first pass: what follows in each row. The processor sees that coming, but not soon enough
    kTiles,   // each pass a share of a later tile, row by row: else memory would be idle in all passes but the first
    kMemory,  // the same as one stream
    kParts    // each pass a share of the next part of the tile
  };
  static constexpr int64_t kStep = Terms<X, T>::kStep, kBytes = kStep * int64_t{sizeof(T)};
  static constexpr int64_t kAhead = 2048, kFar = 8192, kNear = 12288;
  // Twice x, a tile and the next one: up to here one stream was faster. A first cache had 48 KiB there.
  static constexpr int64_t kMostBytes = 62 * 1024;
  // Of x, beside which the first cache has room for as much of the weights, and for what comes after it.
  static constexpr int64_t kPartBytes = 8192, kLeastPart = 128, kMostRowsOfParts = 24;

  Order order_ = Order::kRows;
  int64_t begin_ = kAhead, of_pass_ = 0, share_ = 0;
};

// Rows of x that are multiplied with each row of weights, which is read once.
template <class X, class T>
class FewRows {
 public:
  // The rows of x are `stride` apart.
  FewRows(const X* x, int64_t stride, int64_t num_rows, int64_t size, const Prefetching& prefetching)
      : x_(x),
        stride_(stride),
        num_rows_(num_rows),
        size_(size),
        prefetching_(prefetching),
        plan_(num_rows, size, prefetching),
        parts_(plan_.has_parts() ? num_rows * size : 0) {
    if (!plan_.has_parts()) return;
    // The rows of a part side by side: as far apart as they are, many would share a few sets of the first cache.
    auto* parts = reinterpret_cast<X*>(parts_.data());
    for (int64_t i = 0; i < size; i += plan_.part) {
      const int64_t n = smaller(plan_.part, size - i);
      for (int64_t r = 0; r < num_rows; ++r, parts += n) {
        std::memcpy(parts, x + r * stride + i, static_cast<size_t>(n) * sizeof(X));
      }
    }
    x_ = reinterpret_cast<const X*>(parts_.data());
  }

  // Calls put(r, o, sum) for the rows of weights from `begin` to `end`.
  template <class Put>
  void multiply(const T* weights, int64_t begin, int64_t end, const Put& put) const {
    if constexpr (kMayPreferFirstCache) {
      if (plan_.has_parts()) return multiply_as<true>(weights, begin, end, put);
    }
    multiply_as<false>(weights, begin, end, put);
  }

 private:
  template <bool kParts, class Put>
  void multiply_as(const T* weights, int64_t begin, int64_t end, const Put& put) const {
    // Copies, which nothing that is stored can change.
    const FewRowsPlan<X, T> plan = plan_;
    const Prefetching prefetching = prefetching_;
    const int64_t num_rows = num_rows_, size = size_, stride = stride_;
    const Scratch memory(kParts ? plan.tiles * num_rows * kTileWeights * kLanes : 0);
    // Multiplies the rows o, o + apart, and so on, from their number i on.
    const auto tile = [&](auto num_w, int64_t o, int64_t apart, int64_t i, F* sums) __attribute__((always_inline)) {
      constexpr int kWeights = decltype(num_w)::value;
      const int64_t length = kParts ? smaller(plan.part, size - i) : size;
      const bool is_last = i + length == size;
      const T* rows[kWeights];
      for (int w = 0; w < kWeights; ++w) rows[w] = weights + (o + w * apart) * size + i;
      const X* x = x_ + (kParts ? i * num_rows : 0);
      int64_t r = 0;
      for (int64_t pass = 0; pass < plan.passes; ++pass) {
        const int64_t n = (num_rows - r) / (plan.passes - pass);  // the same for all, or one more
        with_count<kPassRows>(n, [&](auto num_x) {
          constexpr int kRows = decltype(num_x)::value;
          float totals[kRows * kWeights];
          const Ahead ahead = plan.ahead(pass, apart * size * int64_t{sizeof(T)}, i);
          if constexpr (kParts) {
            const X* const part = x + r * length;
            F* const of_part = sums + r * kWeights;
            if (!is_last) {
              i == 0 ? dots<kRows, kWeights, 3>(of_part, kWeights, part, length, rows, length, ahead)
                     : dots<kRows, kWeights, 3, true>(of_part, kWeights, part, length, rows, length, ahead);
              return;
            }
            i == 0 ? total_dots<kRows, kWeights, 3>(totals, nullptr, part, length, rows, length, ahead)
                   : total_dots<kRows, kWeights, 3, true>(totals, of_part, part, length, rows, length, ahead);
          } else {
            with_locality(prefetching, [&](auto locality) {
              total_dots<kRows, kWeights, decltype(locality)::value>(totals, nullptr, x + r * stride, stride, rows,
                                                                     size, ahead);
            });
          }
          for (int k = 0; k < kRows; ++k) {
            for (int w = 0; w < kWeights; ++w) put(r + k, o + w * apart, totals[k * kWeights + w]);
          }
        });
        r += n;
      }
    };
    // Multiplies so many tiles, whose first rows are `step` apart.
    const auto columns = [&](auto num_w, int64_t first, int64_t tiles, int64_t step, int64_t apart) {
      if constexpr (!kParts) {
        for (int64_t t = 0; t < tiles; ++t) tile(num_w, first + t * step, apart, 0, nullptr);
      } else {
        for (int64_t t = 0; t < tiles; t += plan.tiles) {
          for (int64_t i = 0; i < size; i += plan.part) {
            for (int64_t of = 0; of < smaller(plan.tiles, tiles - t); ++of) {
              tile(num_w, first + (t + of) * step, apart, i,
                   reinterpret_cast<F*>(memory.data()) + of * num_rows * kTileWeights);
            }
          }
        }
      }
    };
    const int64_t tiles = (end - begin) / kTileWeights, rest = begin + tiles * kTileWeights;
    // Without neighbours, a tile has the rows o, o + tiles, and so on; the next tile has the rows after them. These are
    // long streams, which the processor sees coming; neighbouring rows would be many short ones.
    const bool has_neighbours = plan.has_neighbours();
    columns(Int<kTileWeights>{}, begin, tiles, has_neighbours ? kTileWeights : 1, has_neighbours ? 1 : tiles);
    columns(Int<1>{}, rest, end - rest, 1, 1);
  }

  const X* x_;
  int64_t stride_, num_rows_, size_;
  const Prefetching& prefetching_;
  FewRowsPlan<X, T> plan_;
  Scratch parts_;
};

}  // namespace
}  // namespace eqxcallback::cpu
