// Many rows of x, as digits, times rows of weights side by side, by tiles of bytes: 16 rows of each at a time. The sums
// of integers are exact, so a row of x gets what it gets by other products of bytes, bit by bit.
#pragma once

#include "cpu/kernels/linear_digit_panels.h"
#include "cpu/kernels/linear_interleaved_bytes.h"
#ifdef EQXCALLBACK_EMULATED_TILES
#include "cpu/simd/tiles.h"
#endif

namespace eqxcallback::cpu {
namespace {

static_assert(kLanes == BlockTiles::kColumns);

inline constexpr int kTileRows = static_cast<int>(BlockTiles::kRows);
// Fewer rows are multiplied by vectors in less time.
template <int kDigits>
inline constexpr int64_t kFewestOfTiles = kDigits == 3 ? 12 : 32;

// A block of 16 rows of x, whose digits are tiles.
template <int kDigits>
struct alignas(64) TileBlock {
  int8_t digits[kDigits][kTileRows][kBlockSize];                         // from the lowest on
  float lower_scale[kTileRows], upper_scale[kTileRows], sum[kTileRows];  // as LaneBlock has them
};

// A processor with tiles has a second cache of 2 MiB.
template <int kDigits>
using TileRowsAtOnce = RowsAtOnce<TileBlock<kDigits>, kTileRows, int64_t{1} << 20>;

// Sets row r of some blocks. Returns false if x has no form in bytes.
template <int kDigits>
bool to_tiles(TileBlock<kDigits>* blocks, int64_t r, const float* x, int64_t num_blocks) {
  for (int64_t b = 0; b < num_blocks; ++b, x += kBlockSize) {
    TileBlock<kDigits>& block = blocks[b];
    Steps steps;
    if (!digit_steps<kDigits>(steps, x)) return false;
    F sum = Simd::zero();
    for (int half = 0; half < 2; ++half) {
      split_half<kDigits, kDigits>(block.digits[0][r], sizeof(block.digits[0]), x, half, steps, sum);
    }
    block.sum[r] = Simd::sum(sum);
    block.lower_scale[r] = steps.scale;
    block.upper_scale[r] = kDigits == 3 ? 256 * steps.scale : 0;
  }
  return true;
}

// A block of 16 rows of weights: fours of bytes with a sign, their scales, and their minimums, if there are any.
struct TileWeights {
  const void* fours;
  int64_t stride;  // in bytes
  F scales, minimums;
};

// The products of a block, of which kDigits tiles have the sums.
template <int kDigits>
[[gnu::always_inline]] inline void multiply_byte_tiles(int32_t (*sums)[kTileRows][kLanes], const TileBlock<kDigits>& x,
                                                       const TileWeights& weights) {
  BlockTiles::load<BlockTiles::kRight>(weights.fours, weights.stride);
  const auto digit = [&](auto d) __attribute__((always_inline)) {
    constexpr int kDigit = decltype(d)::value;
    BlockTiles::zero<kDigit>();
    BlockTiles::load<BlockTiles::kLeft>(x.digits[kDigit], kBlockSize);
    BlockTiles::dot_bytes<kDigit, BlockTiles::kLeft, BlockTiles::kRight>();
    BlockTiles::store<kDigit>(sums[kDigit], sizeof(sums[kDigit][0]));
  };
  digit(Int<0>{});
  if constexpr (kDigits == 3) digit(Int<1>{}), digit(Int<2>{});
}

// 16 rows of x times 16 rows of weights, those that weights(block) returns. The sums of one block are added while the
// next ones are multiplied.
template <Encoding encoding, int kDigits, bool kHasMinimums, class Weights>
void tile_sums(F (&total)[kTileRows], const TileBlock<kDigits>* x, int64_t num_blocks, const Weights& weights) {
  alignas(64) int32_t sums[2][kDigits][kTileRows][kLanes];
  TileWeights last{};
  const auto add = [&](int64_t block) __attribute__((always_inline)) {
    const TileBlock<kDigits>& of_x = x[block];
#pragma GCC unroll 16
    for (int i = 0; i < kTileRows; ++i) {
      Ints of_digits[kDigits];
#pragma GCC unroll 3
      for (int d = 0; d < kDigits; ++d) of_digits[d] = Bytes::load(sums[block & 1][d][i]);
      const F dot = dot_of_digits<encoding>(of_digits, of_x.lower_scale[i], of_x.upper_scale[i]);
      total[i] = Simd::fma(dot, last.scales, total[i]);
      if constexpr (kHasMinimums) total[i] = Simd::fma(last.minimums, Simd::broadcast(of_x.sum[i]), total[i]);
    }
  };
#pragma GCC unroll 16
  for (int i = 0; i < kTileRows; ++i) total[i] = Simd::zero();
  for (int64_t block = 0; block < num_blocks; ++block) {
    const TileWeights some = weights(block);
    multiply_byte_tiles(sums[block & 1], x[block], some);
    if (block > 0) add(block - 1);
    last = some;
  }
  if (num_blocks > 0) add(num_blocks - 1);
}

// Stores rows of totals, and as many columns as count.
template <class T>
void store_totals(T* out, int64_t stride, const F (&total)[kTileRows], int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < smaller<int64_t>(rows, kTileRows); ++i) {
    for_vectors(columns, [&](int64_t c, auto count) { store(out + i * stride + c, total[i], count); });
  }
}

// Nanoseconds that a block of 32 weights takes, for so many rows of x.
template <int kDigits>
double nanoseconds_by_tiles(int64_t rows) {
  return (kDigits == 3 ? 0.2 : 0.1) * static_cast<double>(rows) + 1;
}

// As multiply_digit_panels does, with panels whose weights have signs.
template <Encoding encoding, int kDigits, class T, class ForPanels>
bool multiply_tile_panels(T* out, const float* x, int64_t num_rows, int64_t out_features, int64_t num_blocks,
                          const Executor& executor, const ForPanels& for_panels) {
  using Panel = DigitPanel<encoding, true>;
  static_assert(Panel::kHalves == 1);  // a half would fill a quarter of a tile
  TileRowsAtOnce<kDigits> lanes(num_rows, num_blocks, kTileRows);
  for (int64_t first = 0; first < num_rows; first += lanes.step()) {
    const int64_t rows = smaller(lanes.step(), num_rows - first);
    if (!lanes.set(x + first * num_blocks * kBlockSize, rows, executor, to_tiles<kDigits>)) return false;
    const auto multiply = [&](Panel panel, int64_t o, int64_t columns) {
      for (int64_t r = 0; r < rows; r += kTileRows) {
        for (int64_t v = 0; v < columns; v += kLanes) {
          F total[kTileRows];
          tile_sums<encoding, kDigits, Panel::kHasMinimums>(
              total, lanes.row(r), num_blocks, [&](int64_t b) __attribute__((always_inline)) {
                TileWeights weights{panel.fours(b, 0) + v, Panel::kRows * int64_t{sizeof(ByteFour)},
                                    Simd::load(panel.scales(b, 0) + v), Simd::zero()};
                if constexpr (Panel::kHasMinimums) weights.minimums = Simd::load(panel.minimums(b) + v);
                return weights;
              });
          store_totals(out + (first + r) * out_features + o + v, out_features, total, rows - r,
                       smaller<int64_t>(kLanes, columns - v));
        }
      }
    };
    parallel_for(
        executor, out_features, static_cast<double>(num_blocks) * nanoseconds_by_tiles<kDigits>(rows),
        [&](int64_t begin, int64_t end) {
          [[maybe_unused]] const BlockTiles tiles;
          Scratch scratch(Panel::floats(num_blocks));
          const Panel panel{scratch.data()};
          for_panels(panel, begin, end, [&](int64_t o, int64_t columns) { multiply(panel, o, columns); });
        },
        Panel::kRows);
  }
  return true;
}

// As multiply_group_digits does.
template <Encoding encoding, int kDigits, class T>
bool multiply_group_tiles(const QuantizedLinear& args, const float* x, const Executor& executor) {
  using Block = GroupBlock<encoding>;
  constexpr int64_t kInts = kBlockSize / 4 * kLanes;  // of a block, as fours of bytes
  const int64_t num_blocks = args.in_features / kBlockSize;
  TileRowsAtOnce<kDigits> lanes(args.rows, num_blocks, kTileRows);
  for (int64_t first = 0; first < args.rows; first += lanes.step()) {
    const int64_t rows = smaller(lanes.step(), args.rows - first);
    if (!lanes.set(x + first * args.in_features, rows, executor, to_tiles<kDigits>)) return false;
    const auto multiply = [&](int32_t* fours, const uint8_t* group, int64_t o) {
      for (int64_t b = 0; b < num_blocks; ++b) {
        const Block block{group + b * Block::kBytes, 0};
        prefetch(block.block + kGroupAhead, Block::kBytes, args.prefetching);
        for_fours<encoding>(block, [&](int j, Ints bytes) {
          // With signs again.
          Bytes::store(fours + b * kInts + j * kLanes, Block::kHasMinimums ? bytes : Bytes::as_weights(bytes));
        });
      }
      for (int64_t r = 0; r < rows; r += kTileRows) {
        F total[kTileRows];
        tile_sums<encoding, kDigits, Block::kHasMinimums>(
            total, lanes.row(r), num_blocks, [&](int64_t b) __attribute__((always_inline)) {
              const Block block{group + b * Block::kBytes, 0};
              TileWeights weights{fours + b * kInts, 4 * kLanes, block.scales(), Simd::zero()};
              if constexpr (Block::kHasMinimums) weights.minimums = block.minimums();
              return weights;
            });
        T* out = static_cast<T*>(args.out) + (first + r) * args.out_features + o;
        store_totals(out, args.out_features, total, rows - r, kLanes);
      }
    };
    parallel_for(
        executor, args.out_features, static_cast<double>(num_blocks) * nanoseconds_by_tiles<kDigits>(rows),
        [&](int64_t begin, int64_t end) {
          [[maybe_unused]] const BlockTiles tiles;
          Scratch fours(num_blocks * kInts);
          for_groups<encoding>(args, begin, end, [&](const uint8_t* group, int64_t o) {
            multiply(reinterpret_cast<int32_t*>(fours.data()), group, o);
          });
        },
        kGroupRows);
  }
  return true;
}

}  // namespace
}  // namespace eqxcallback::cpu
