// Products of matrices, by tiles of bf16: 32 lines of one matrix and 32 of the other have their sums in registers. Both
// are packed once, and then each thread computes a part of the result that has its operands in the caches.
//
// Numbers of f32 have three terms, and of the nine products of these the six that an f32 can tell from nothing are
// summed: the other three are less than 2^-24 of the first one. Where they are not, as some number is not finite, or
// too far from one, a block is multiplied in f32.
#pragma once

#include "cpu/kernels/tile_packs.h"

namespace eqxcallback::cpu {
namespace {

// Steps that are multiplied before the next lines are: those of 32 lines, of two factors, have room in a first cache.
template <int kTerms>
inline constexpr int64_t kDepth = kTerms == 1 ? 8 : 2;

// 32 lines of a left factor: its tiles, at each step and of each term.
struct LeftBlock {
  const Bf16* data;
  int64_t row, half, step;  // how far rows of a tile, the two tiles and the steps are apart
};

// What is multiplied next, of which a share is prefetched at each step, lines of cache of both blocks: else a thread
// waits for the last cache as long as it multiplies.
struct NextBlocks {
  LeftBlock left;
  const Bf16* right;
  int64_t right_step;
  int64_t left_line, left_lines, right_line, right_lines;

  [[gnu::always_inline]] void prefetch_share(int64_t step) const {
    for (int64_t i = left_line; i < left_line + left_lines; ++i)
      prefetch(left.data + i * left.row + step * left.step, 1);
    for (int64_t i = right_line; i < right_line + right_lines; ++i) {
      prefetch(right + step * right_step + i * kTileSize, 1);
    }
  }
};

// The tiles that one step has in registers.
struct Step {
  const Bf16 *first, *second;  // of the left factor
  int64_t row;
  const Bf16* right;

  template <int kTerm>
  void load_left() const {
    Tiles::load<4>(first + kTerm * 2 * kTileNumbers, 2 * row);
    Tiles::load<5>(second + kTerm * 2 * kTileNumbers, 2 * row);
  }
  template <int kTerm>
  void load_right() const {
    Tiles::load<6>(right + kTerm * 2 * kTileNumbers, 64);
    Tiles::load<7>(right + (kTerm * 2 + 1) * kTileNumbers, 64);
  }
  static void dot() { Tiles::dot<0, 4, 6>(), Tiles::dot<1, 4, 7>(), Tiles::dot<2, 5, 6>(), Tiles::dot<3, 5, 7>(); }

  // Sums the products of terms, the low ones first. As few terms as can be are loaded twice.
  template <int kTerms>
  void multiply() const {
    if constexpr (kTerms == 3) {
      load_left<2>(), load_right<0>(), dot();
      load_left<1>(), dot();
      load_right<1>(), dot();
      load_left<0>(), dot();
      load_right<2>(), dot();
    } else {
      load_left<0>();
    }
    load_right<0>(), dot();
  }
};

// out = sums + a b over so many steps. Rows of sums, which may be null, are `stride` floats apart.
template <int kTerms>
void multiply_blocks(float* out, int64_t out_stride, const float* sums, int64_t stride, const LeftBlock& a,
                     const Bf16* b, int64_t steps, const NextBlocks& next) {
  if (sums == nullptr) {
    Tiles::zero<0>(), Tiles::zero<1>(), Tiles::zero<2>(), Tiles::zero<3>();
  } else {
    Tiles::load<0>(sums, 4 * stride), Tiles::load<1>(sums + kTileLines, 4 * stride);
    sums += kTileLines * stride;
    Tiles::load<2>(sums, 4 * stride), Tiles::load<3>(sums + kTileLines, 4 * stride);
  }
  Step step{a.data, a.data + a.half, a.row, b};
  for (int64_t i = 0; i < steps; ++i) {
    next.prefetch_share(i);
    step.multiply<kTerms>();
    step.first += a.step, step.second += a.step, step.right += kTerms * 2 * kTileNumbers;
  }
  Tiles::store<0>(out, 4 * out_stride), Tiles::store<1>(out + kTileLines, 4 * out_stride);
  out += kTileLines * out_stride;
  Tiles::store<2>(out, 4 * out_stride), Tiles::store<3>(out + kTileLines, 4 * out_stride);
}

template <class T>
void store_rows(const PartOfResult<T>& to, const float* sums) {
  for (int64_t r = 0; r < to.rows; ++r) {
    for_vectors(to.columns,
                [&](int64_t i, auto count) { to.put(r, i, Simd::load(sums + r * kBlockLines + i), count); });
  }
}

// Stores a block whose rows are columns of the result.
template <class T>
void store_swapped(const PartOfResult<T>& to, const float* sums) {
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

// Packed factors, of so many terms each.
template <int kTerms>
struct PackedFactors {
  static constexpr int64_t kStep = kTerms * 2 * kTileNumbers;  // numbers of a block at each step
  const Bf16* direct;  // blocks of the left factor that are read where they are, of rows of so many numbers
  int64_t direct_blocks, row;
  const Bf16 *left, *right;
  int64_t left_blocks, right_blocks, steps;
  bool is_swapped;  // rows of the left factor are columns of the result

  LeftBlock left_block(int64_t block) const {
    if (block < direct_blocks) return {direct + block * kBlockLines * row, row, kTileLines * row, kTileSize};
    return {left + (block - direct_blocks) * steps * kStep, kTileSize, kTileNumbers, kStep};
  }
  const Bf16* right_step(int64_t block, int64_t step) const { return right + (block * steps + step) * kStep; }
};

// So many blocks of both factors, from `left` and `right` on.
struct Part {
  int64_t left, lefts, right, rights;
};

// Computes a part of the result, and prefetches the one that is so much further on. mend(left, right, sums) may change
// the sums of a block.
template <class T, int kTerms, class Mend>
void multiply_part(const PartOfResult<T>& out, const PackedFactors<kTerms>& factors, const Part& part,
                   int64_t next_left, int64_t next_right, float* sums, const Mend& mend) {
  constexpr int64_t kStride = kPartBlocks * kBlockLines;
  constexpr int64_t kLines = kTerms * kBlockLines, kSteps = kDepth<kTerms>;  // lines of cache of a block at each step
  const int64_t steps = factors.steps, lefts = part.lefts, rights = part.rights;
  alignas(64) float block[kBlockLines * kBlockLines];
  [[maybe_unused]] const Tiles tiles;
  bool is_last = false;
  for (int64_t step = 0; !is_last; step += kSteps) {
    const int64_t depth = smaller(kSteps, steps - step);
    is_last = step + depth == steps;
    const int64_t next_step = is_last ? 0 : step + depth;
    for (int64_t i = 0; i < lefts; ++i) {
      LeftBlock a = factors.left_block(part.left + i);
      a.data += step * a.step;
      for (int64_t j = 0; j < rights; ++j) {
        const Bf16* b = factors.right_step(part.right + j, step);
        NextBlocks next{factors.left_block(part.left + i + (is_last ? next_left : 0)),
                        factors.right_step(part.right + j + (is_last ? next_right : 0), next_step),
                        PackedFactors<kTerms>::kStep,
                        kLines * j / rights,
                        rights == 1 ? 0 : kLines * (j + 1) / rights - kLines * j / rights,
                        kLines * i / lefts,
                        kLines * (i + 1) / lefts - kLines * i / lefts};
        next.left.data += next_step * next.left.step;
        float* known = sums + (i * kStride + j) * kBlockLines;
        const float* before = step == 0 ? nullptr : known;
        const auto multiply = multiply_blocks<kTerms>;
        if (!is_last) {
          multiply(known, kStride, before, kStride, a, b, depth, next);
          continue;
        }
        multiply(block, kBlockLines, before, kStride, a, b, depth, next);
        mend(part.left + i, part.right + j, block);
        const int64_t of_left = (part.left + i) * kBlockLines, of_right = (part.right + j) * kBlockLines;
        const bool is_swapped = factors.is_swapped;
        const auto to =
            out.part(is_swapped ? of_right : of_left, is_swapped ? of_left : of_right, kBlockLines, kBlockLines);
        is_swapped ? store_swapped(to, block) : store_rows(to, block);
      }
    }
  }
}

// The floats of memory that a part needs.
template <int kTerms>
int64_t sums_of_part(int64_t steps, int64_t lefts) {
  return steps > kDepth<kTerms> ? lefts * kPartBlocks * kBlockLines * kBlockLines : 0;
}

// The products of one block of lines with another, in f32.
void multiply_in_f32(float* sums, const FactorLines<float>& left, const FactorLines<float>& right, int64_t of_left,
                     int64_t of_right) {
  alignas(64) float a[2][kTileNumbers], b[2][kTileNumbers], turned[kBlockLines];
  std::memset(sums, 0, kBlockLines * kBlockLines * sizeof(float));
  for (int64_t at = 0; at < left.size; at += kTileSize) {
    TileNumbers<float> of_a[2], of_b[2];
    for (int64_t half = 0; half < 2; ++half) {
      of_a[half] = numbers_of_tile(a[half], left, of_left * kBlockLines + half * kTileLines, at);
      of_b[half] = numbers_of_tile(b[half], right, of_right * kBlockLines + half * kTileLines, at);
    }
    const auto number = [&](const TileNumbers<float>* tiles, bool are_columns, int64_t line, int64_t i) {
      const TileNumbers<float>& tile = tiles[line / kTileLines];
      const int64_t of_tile = line % kTileLines;
      return tile.data[are_columns ? i * tile.stride + of_tile : of_tile * tile.stride + i];
    };
    for (int64_t i = 0; i < smaller(kTileSize, left.size - at); ++i) {
      for (int64_t c = 0; c < kBlockLines; ++c) turned[c] = number(of_b, right.are_columns, c, i);
      for (int64_t r = 0; r < kBlockLines; ++r) {
        const F factor = Simd::broadcast(number(of_a, left.are_columns, r, i));
        for (int64_t c = 0; c < kBlockLines; c += kLanes) {
          float* to = sums + r * kBlockLines + c;
          Simd::store(to, Simd::fma(factor, Simd::load(turned + c), Simd::load(to)));
        }
      }
    }
  }
}

// Nanoseconds that a tile takes to pack, and to be multiplied.
inline constexpr double kPackNanoseconds = 40, kMultiplyNanoseconds = 12;

// Computes all parts, on all threads.
template <class T, int kTerms, class Mend>
void multiply_parts(const PartOfResult<T>& out, const PackedFactors<kTerms>& factors, const Executor& executor,
                    const Mend& mend) {
  const int64_t of_left = factors.left_blocks, of_right = factors.right_blocks;
  // Parts are smaller where there would be fewer than each thread should have.
  const int64_t threads = executor.threads(executor.pool), parts_right = (of_right + kPartBlocks - 1) / kPartBlocks;
  int64_t lefts = kPartBlocks;
  const auto parts_left = [&] { return (of_left + lefts - 1) / lefts; };
  while (threads > 1 && lefts > 1 && parts_left() * parts_right < 4 * threads) lefts /= 2;
  const double nanoseconds =
      static_cast<double>(lefts * smaller(kPartBlocks, of_right) * factors.steps) * 4 * kTerms * kMultiplyNanoseconds;
  parallel_for(executor, parts_left() * parts_right, nanoseconds, [&](int64_t begin, int64_t end) {
    Scratch sums(sums_of_part<kTerms>(factors.steps, lefts));
    for (int64_t i = begin; i < end; ++i) {
      const int64_t l = i / parts_right * lefts, r = i % parts_right * kPartBlocks;
      const Part part{l, smaller(lefts, of_left - l), r, smaller(kPartBlocks, of_right - r)};
      const bool is_next_right = parts_right > 1;
      multiply_part(out, factors, part, is_next_right ? 0 : lefts, is_next_right ? kPartBlocks : 0, sums.data(), mend);
    }
  });
}

// Packs blocks of lines on all threads.
template <bool kIsRight, class N>
void pack_on_threads(Bf16* out, float* highest, const FactorLines<N>& from, int64_t blocks, const Executor& executor) {
  const double nanoseconds = static_cast<double>(kTermsOf<N> * 2 * steps_of(from.size)) * kPackNanoseconds;
  parallel_for(executor, blocks, nanoseconds,
               [&](int64_t begin, int64_t end) { pack_blocks<kIsRight>(out, highest, from, begin, end); });
}

// Computes the result of one example, of factors whose elements are N, group by group.
template <class T, class N>
void multiply_factors(const PartOfResult<T>& out, const TileProductPlan& plan, void* memory, const FactorLines<N>& a,
                      const FactorLines<N>& b, const Executor& executor) {
  const FactorLines<N>&left = plan.is_swapped ? b : a, &right = plan.is_swapped ? a : b;
  constexpr int kTerms = kTermsOf<N>;
  auto* packed_left = static_cast<Bf16*>(memory);
  Bf16* packed_right = packed_left + plan.packed * plan.numbers;
  auto* highest_left = reinterpret_cast<float*>(packed_right + plan.right_group * plan.numbers);
  float* highest_right = highest_left + plan.packed;
  // The right factor is packed as much at a time as stays in the second caches of all threads.
  const int64_t right_group = plan.right_group;
  const int64_t lefts = plan.left_group * kBlockLines, rights = right_group * kBlockLines;
  const int64_t depth = plan.depth * kTileSize;
  FactorLines<N> of_left{}, of_right{};  // what is packed
  const auto multiply = [&](int64_t l, int64_t r, int64_t at) {
    const FactorLines<N> some = left.part(l, lefts, at, depth), others = right.part(r, rights, at, depth);
    const int64_t direct = plan.is_direct ? some.count / kBlockLines : 0;
    if (others.data != of_right.data) {
      of_right = others;
      pack_on_threads<true>(packed_right, highest_right, others, blocks_of(others.count), executor);
    }
    if (some.data != of_left.data) {
      of_left = some;
      const FactorLines<N> rest = some.part(direct * kBlockLines, lefts, 0, depth);
      pack_on_threads<false>(packed_left, highest_left, rest, blocks_of(rest.count), executor);
    }
    const auto to = (plan.is_swapped ? out.part(r, l, rights, lefts) : out.part(l, r, lefts, rights))
                        .stage(at, some.size, left.size);
    PackedFactors<kTerms> factors{nullptr,
                                  0,
                                  some.stride,
                                  packed_left,
                                  packed_right,
                                  blocks_of(some.count),
                                  blocks_of(others.count),
                                  steps_of(some.size),
                                  plan.is_swapped};
    if constexpr (kTerms == 1) {
      factors.direct = some.data, factors.direct_blocks = direct;
      multiply_parts(to, factors, executor, [](int64_t, int64_t, float*) {});
    } else {
      multiply_parts(to, factors, executor, [&](int64_t i, int64_t j, float* sums) {
        if (!has_terms(highest_left[i]) || !has_terms(highest_right[j])) multiply_in_f32(sums, some, others, i, j);
      });
    }
  };
  for (int64_t l = 0; l < left.count; l += lefts) {
    for (int64_t r = 0; r < right.count; r += rights) {
      for (int64_t at = 0; at == 0 || at < left.size; at += depth) multiply(l, r, at);
    }
  }
}

}  // namespace
}  // namespace eqxcallback::cpu
