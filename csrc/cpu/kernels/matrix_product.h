// Products of matrices of bf16, by tiles: 32 lines of one matrix and 32 of the other have their sums in registers. Both
// are packed once, and then each thread computes a part of the result that has its operands in the caches.
#pragma once

#include "cpu/kernels/tile_packs.h"

namespace eqxcallback::cpu {
namespace {

// Numbers of a line that are multiplied before the next lines are: of 32 lines, half of a first cache.
inline constexpr int64_t kDepth = 256 / kTileSize;
// Blocks along one side of a part: its operands and sums have room in a second cache of 1 MiB.
inline constexpr int64_t kPartBlocks = 8;

// 32 lines of a left factor: its tiles, at each step.
struct LeftBlock {
  const Bf16* data;
  int64_t row, half, step;  // how far rows of a tile, the two tiles and the steps are apart
};

// What is multiplied next, of which a share is prefetched at each step, lines of cache of both blocks: else a thread
// waits for the last cache as long as it multiplies.
struct NextBlocks {
  LeftBlock left;
  const Bf16* right;
  int64_t left_line, left_lines, right_line, right_lines;

  [[gnu::always_inline]] void prefetch_share(int64_t step) const {
    for (int64_t i = left_line; i < left_line + left_lines; ++i)
      prefetch(left.data + i * left.row + step * left.step, 1);
    for (int64_t i = right_line; i < right_line + right_lines; ++i) {
      prefetch(right + (step * kBlockLines + i) * kTileSize, 1);
    }
  }
};

// out = sums + a b over so many steps. Rows of sums, which may be null, are `stride` floats apart.
void multiply_blocks(float* out, int64_t out_stride, const float* sums, int64_t stride, const LeftBlock& a,
                     const Bf16* b, int64_t steps, const NextBlocks& next) {
  if (sums == nullptr) {
    Tiles::zero<0>(), Tiles::zero<1>(), Tiles::zero<2>(), Tiles::zero<3>();
  } else {
    Tiles::load<0>(sums, 4 * stride), Tiles::load<1>(sums + kTileLines, 4 * stride);
    sums += kTileLines * stride;
    Tiles::load<2>(sums, 4 * stride), Tiles::load<3>(sums + kTileLines, 4 * stride);
  }
  const Bf16 *first = a.data, *second = a.data + a.half;
  for (int64_t i = 0; i < steps; ++i, first += a.step, second += a.step, b += 2 * kTileNumbers) {
    next.prefetch_share(i);
    Tiles::load<6>(b, 64);
    Tiles::load<4>(first, 2 * a.row);
    Tiles::load<7>(b + kTileNumbers, 64);
    Tiles::dot<0, 4, 6>(), Tiles::dot<1, 4, 7>();
    Tiles::load<5>(second, 2 * a.row);
    Tiles::dot<2, 5, 6>(), Tiles::dot<3, 5, 7>();
  }
  Tiles::store<0>(out, 4 * out_stride), Tiles::store<1>(out + kTileLines, 4 * out_stride);
  out += kTileLines * out_stride;
  Tiles::store<2>(out, 4 * out_stride), Tiles::store<3>(out + kTileLines, 4 * out_stride);
}

// Where a block of sums goes: rows of the result, and the numbers that are added to its columns, if any.
template <class T>
struct BlockOfResult {
  T* out;
  int64_t stride, rows, columns;
  const float* bias;

  template <class Count>
  void put(int64_t row, int64_t i, F sums, Count count) const {
    if (bias != nullptr) sums = Simd::add(sums, load(bias + i, count));
    store(out + row * stride + i, sums, count);
  }
};

template <class T>
void store_rows(const BlockOfResult<T>& to, const float* sums) {
  for (int64_t r = 0; r < to.rows; ++r) {
    for_vectors(to.columns,
                [&](int64_t i, auto count) { to.put(r, i, Simd::load(sums + r * kBlockLines + i), count); });
  }
}

// Stores a block whose rows are columns of the result.
template <class T>
void store_swapped(const BlockOfResult<T>& to, const float* sums) {
  for (int64_t r = 0; r < to.rows; r += kLanes) {
    for_vectors(to.columns, [&](int64_t i, auto count) {
      F tile[kLanes];
#pragma GCC unroll 16
      for (int c = 0; c < kLanes; ++c) tile[c] = Simd::load(sums + (i + c) * kBlockLines + r);
      Simd::transpose(tile);
      for (int64_t j = 0; j < smaller<int64_t>(kLanes, to.rows - r); ++j) to.put(r + j, i, tile[j], count);
    });
  }
}

// The factors of a product, and their packed blocks.
struct PackedFactors {
  ProductPlan plan;
  FactorLines left, right;
  Bf16 *packed_left, *packed_right;
  int64_t steps;

  PackedFactors(const MatrixProduct& args, const FactorLines& a, const FactorLines& b)
      : plan(args),
        left(plan.is_swapped ? b : a),
        right(plan.is_swapped ? a : b),
        packed_left(args.packed),
        packed_right(args.packed + plan.packed_left),
        steps(steps_of(args.size)) {}

  LeftBlock left_block(int64_t block) const {
    if (block < plan.direct_blocks) {
      return {left.data + block * kBlockLines * left.size, left.size, kTileLines * left.size, kTileSize};
    }
    return {packed_left + (block - plan.direct_blocks) * steps * 2 * kTileNumbers, kTileSize, kTileNumbers,
            2 * kTileNumbers};
  }
};

// Computes the blocks of the result from `left` and `right` on, so many of each.
template <class T>
void multiply_part(const BlockOfResult<T>& out, const PackedFactors& factors, int64_t left, int64_t lefts,
                   int64_t right, int64_t rights, int64_t next_left, int64_t next_right, float* sums) {
  constexpr int64_t kStride = kPartBlocks * kBlockLines;
  const int64_t steps = factors.steps;
  alignas(64) float block[kBlockLines * kBlockLines];
  [[maybe_unused]] const Tiles tiles;
  bool is_last = false;
  for (int64_t step = 0; !is_last; step += kDepth) {
    const int64_t depth = smaller(kDepth, steps - step);
    is_last = step + depth == steps;
    const int64_t next_step = is_last ? 0 : step + depth;
    for (int64_t i = 0; i < lefts; ++i) {
      LeftBlock a = factors.left_block(left + i);
      a.data += step * a.step;
      for (int64_t j = 0; j < rights; ++j) {
        const Bf16* b = factors.packed_right + ((right + j) * steps + step) * 2 * kTileNumbers;
        NextBlocks next{
            factors.left_block(left + i + (is_last ? next_left : 0)),
            factors.packed_right + ((right + j + (is_last ? next_right : 0)) * steps + next_step) * 2 * kTileNumbers,
            kBlockLines * j / rights,
            rights == 1 ? 0 : kBlockLines * (j + 1) / rights - kBlockLines * j / rights,
            kBlockLines * i / lefts,
            kBlockLines * (i + 1) / lefts - kBlockLines * i / lefts};
        next.left.data += next_step * next.left.step;
        float* known = sums + (i * kStride + j) * kBlockLines;
        const float* before = step == 0 ? nullptr : known;
        if (!is_last) {
          multiply_blocks(known, kStride, before, kStride, a, b, depth, next);
          continue;
        }
        multiply_blocks(block, kBlockLines, before, kStride, a, b, depth, next);
        const int64_t of_left = (left + i) * kBlockLines, of_right = (right + j) * kBlockLines;
        const int64_t lines = smaller(kBlockLines, factors.left.count - of_left);
        const int64_t others = smaller(kBlockLines, factors.right.count - of_right);
        const bool is_swapped = factors.plan.is_swapped;
        const int64_t row = is_swapped ? of_right : of_left, column = is_swapped ? of_left : of_right;
        BlockOfResult<T> to{out.out + row * out.stride + column, out.stride, lines, others, out.bias};
        if (to.bias != nullptr) to.bias += column;
        if (is_swapped) to.rows = others, to.columns = lines;
        is_swapped ? store_swapped(to, block) : store_rows(to, block);
      }
    }
  }
}

// Nanoseconds that a tile takes to pack, and to be multiplied.
inline constexpr double kPackNanoseconds = 40, kMultiplyNanoseconds = 12;

// Computes the result of one example.
template <class T>
void multiply_factors(const BlockOfResult<T>& out, const PackedFactors& factors, const Executor& executor) {
  const FactorLines &left = factors.left, &right = factors.right;
  const int64_t steps = factors.steps, of_left = blocks_of(left.count), of_right = blocks_of(right.count);
  const int64_t direct = factors.plan.direct_blocks;
  const double pack_nanoseconds = static_cast<double>(2 * steps) * kPackNanoseconds;
  parallel_for(executor, of_right, pack_nanoseconds,
               [&](int64_t begin, int64_t end) { pack_blocks<true>(factors.packed_right, right, 0, begin, end); });
  parallel_for(executor, of_left - direct, pack_nanoseconds,
               [&](int64_t begin, int64_t end) { pack_blocks<false>(factors.packed_left, left, direct, begin, end); });

  // Parts are smaller where there would be fewer than each thread should have.
  const int64_t threads = executor.threads(executor.pool), parts_right = (of_right + kPartBlocks - 1) / kPartBlocks;
  int64_t lefts = kPartBlocks;
  const auto parts_left = [&] { return (of_left + lefts - 1) / lefts; };
  while (threads > 1 && lefts > 1 && parts_left() * parts_right < 4 * threads) lefts /= 2;
  const double nanoseconds =
      static_cast<double>(lefts * smaller(kPartBlocks, of_right) * steps) * 4 * kMultiplyNanoseconds;
  parallel_for(executor, parts_left() * parts_right, nanoseconds, [&](int64_t begin, int64_t end) {
    Scratch sums(steps > kDepth ? lefts * kPartBlocks * kBlockLines * kBlockLines : 0);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t l = i / parts_right * lefts, r = i % parts_right * kPartBlocks;
      const bool is_next_right = parts_right > 1;
      multiply_part(out, factors, l, smaller(lefts, of_left - l), r, smaller(kPartBlocks, of_right - r),
                    is_next_right ? 0 : lefts, is_next_right ? kPartBlocks : 0, sums.data());
    }
  });
}

template <class T>
void matrix_product_as(const MatrixProduct& args, const Executor& executor) {
  for (int64_t e = 0; e < args.examples && args.rows > 0 && args.columns > 0; ++e) {
    const FactorLines a{args.a + e * args.rows * args.size, args.rows, args.size, args.a_has_columns};
    const FactorLines b{args.b + e * args.columns * args.size, args.columns, args.size, args.b_has_columns};
    T* out = static_cast<T*>(args.out) + e * args.rows * args.columns;
    multiply_factors(BlockOfResult<T>{out, args.columns, args.rows, args.columns, args.bias}, PackedFactors(args, a, b),
                     executor);
  }
}

void matrix_product(Element of_out, const MatrixProduct& args, const Executor& executor) {
  with_type(of_out, [&](auto* type) { matrix_product_as<Pointee<decltype(type)>>(args, executor); });
}

}  // namespace
}  // namespace eqxcallback::cpu
