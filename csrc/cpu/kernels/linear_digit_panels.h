// Many rows of x, as digits, times quantised weights. A few rows of weights at a time are put side by side in cache,
// four neighbouring weights of a row in a lane, so that no sum goes across lanes and the products of bytes are all that
// is left to do. A row of x gets the same result among any number of rows.
#pragma once

#include "cpu/kernels/linear_digit_sums.h"
#include "cpu/kernels/outer.h"

namespace eqxcallback::cpu {
namespace {

// Rows of weights side by side. Of each block in turn: kFours times the next four weights of each row, one scale of
// each or two, and a minimum of each. Weights are too_high, or have a sign.
template <Encoding encoding, bool kHasSigns = false>
struct DigitPanel {
  static constexpr int kVectors = 2;
  static constexpr int64_t kRows = kVectors * kLanes;
  static constexpr int kFours = static_cast<int>(kBlockSize) / 4;
  static constexpr int kHalves = encoding == Encoding::kPlainHalves ? 2 : 1;
  static constexpr bool kHasMinimums = encoding == Encoding::kQ4_1 || encoding == Encoding::kPlain;

  float* const memory;

  static int64_t floats(int64_t num_blocks) { return (num_blocks + 1) * kFloats; }  // set two at a time

  ByteFour* fours(int64_t b, int64_t i) const { return reinterpret_cast<ByteFour*>(at(b, i)); }
  float* scales(int64_t b, int half) const { return at(b, kFours + half); }
  float* minimums(int64_t b) const { return at(b, kFours + kHalves); }

  // Puts a part of a block, or several blocks, from kLanes rows there.
  [[gnu::always_inline]] void put(F* rows, int64_t b, int part, int64_t row) const {
    Simd::transpose(rows);
    for (int j = 0; j < kLanes; ++j) {
      const int i = part * kLanes + j;
      if constexpr (kHasSigns && too_high(encoding) != 0) {
        using Bytes8 = uint8_t __attribute__((vector_size(4 * kLanes)));
        rows[j] = reinterpret_cast<F>(reinterpret_cast<Bytes8>(rows[j]) - static_cast<uint8_t>(too_high(encoding)));
      }
      store_fours(fours(b + i / kFours, i % kFours) + row, rows[j]);
    }
  }

  // Sets at most kRows rows, of Q4_1, Q8_0 or unpacked blocks. The last row fills the others, whose results are
  // dropped.
  void set(const uint8_t* weights, int64_t rows, int64_t num_blocks) const {
    const int64_t stride = num_blocks * block_bytes(encoding);
    for (int64_t w = 0; w < kRows; w += kLanes) {
      for (int64_t b = 0; b < num_blocks; b += Bytes::kBlocks) {
        F parts[Bytes::kParts][kLanes];
        for (int r = 0; r < kLanes; ++r) {
          const uint8_t* row = weights + smaller(w + r, rows - 1) * stride;
          const uint8_t* blocks[Bytes::kBlocks];
          for (int i = 0; i < Bytes::kBlocks; ++i) {
            blocks[i] = row + smaller(b + i, num_blocks - 1) * block_bytes(encoding);
            set_head(blocks[i], b + i, w + r);
          }
          for (int p = 0; p < Bytes::kParts; ++p) {
            parts[p][r] = reinterpret_cast<F>(Bytes::of_blocks<encoding>(blocks, p));
          }
        }
        for (int p = 0; p < Bytes::kParts; ++p) put(parts[p], b, p, w);
      }
    }
  }

 private:
  static constexpr int64_t kFloats = (kFours + kHalves + 1) * kRows;
  float* at(int64_t b, int64_t i) const { return memory + b * kFloats + i * kRows; }

  void set_head(const uint8_t* block, int64_t b, int64_t row) const {
    if constexpr (is_plain(encoding)) {
      const auto& plain = *reinterpret_cast<const PlainBlock*>(block);
      for (int half = 0; half < kHalves; ++half) scales(b, half)[row] = plain.scale[half];
      minimums(b)[row] = plain.minimum;
    } else {
      scales(b, 0)[row] = Simd::half(block);
      if constexpr (kHasMinimums) minimums(b)[row] = Simd::half(block + 2);
    }
  }
};

// kX rows of x times the rows of a panel.
template <Encoding encoding, int kDigits, int kX, int kVectors>
[[gnu::always_inline]] inline void panel_sums(F (&total)[kX][kVectors], DigitPanel<encoding> panel,
                                              const LaneBlock<kDigits>* x, int64_t num_blocks) {
  using Panel = DigitPanel<encoding>;
  constexpr int kFours = Panel::kFours / Panel::kHalves;
#pragma GCC unroll 8
  for (int i = 0; i < kX; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) total[i][v] = Simd::zero();
  }
  for (int64_t b = 0; b < num_blocks; ++b) {
#pragma GCC unroll 2
    for (int half = 0; half < Panel::kHalves; ++half) {
      Ints sums[kDigits][kX][kVectors] = {};
      if constexpr (too_high(encoding) != 0) {
#pragma GCC unroll 8
        for (int i = 0; i < kX; ++i) {
          const LaneBlock<kDigits>& of_x = x[i * num_blocks + b];
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) {
            sums[0][i][v] += of_x.lower[half];
            if constexpr (kHasUpper<encoding, kDigits>) sums[1][i][v] += of_x.upper[half];
          }
        }
      }
#pragma GCC unroll 8
      for (int j = half * kFours; j < (half + 1) * kFours; ++j) {
        Ints weights[kVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) weights[v] = Bytes::load(panel.fours(b, j) + v * kLanes);
#pragma GCC unroll 8
        for (int i = 0; i < kX; ++i) {
#pragma GCC unroll 3
          for (int d = 0; d < kDigits; ++d) {
            const Ints factor = factor_of(reinterpret_cast<const ByteFour*>(x[i * num_blocks + b].digits[d]) + j);
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) sums[d][i][v] = Simd::fma(factor, weights[v], sums[d][i][v]);
          }
        }
      }
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const F scales = Simd::load(panel.scales(b, half) + v * kLanes);
#pragma GCC unroll 8
        for (int i = 0; i < kX; ++i) {
          const LaneBlock<kDigits>& of_x = x[i * num_blocks + b];
          Ints of_digits[kDigits];
#pragma GCC unroll 3
          for (int d = 0; d < kDigits; ++d) of_digits[d] = sums[d][i][v];
          total[i][v] =
              Simd::fma(dot_of_digits<encoding>(of_digits, of_x.lower_scale, of_x.upper_scale), scales, total[i][v]);
          if constexpr (Panel::kHasMinimums) {
            const F minimums = Simd::load(panel.minimums(b) + v * kLanes);
            total[i][v] = Simd::fma(minimums, Simd::broadcast(of_x.sum), total[i][v]);
          }
        }
      }
    }
  }
}

// Computes out = x W^T. for_panels(panel, begin, end, multiply) sets the panel to rows of W from `begin` to `end`, and
// calls multiply(o, rows) with the number of the first of them and how many there are. Returns false if x has no form
// in bytes.
template <Encoding encoding, int kDigits, class T, class ForPanels>
bool multiply_digit_panels(T* out, const float* x, int64_t num_rows, int64_t out_features, int64_t num_blocks,
                           const Executor& executor, const ForPanels& for_panels) {
  using Panel = DigitPanel<encoding>;
  constexpr int kVectors = Panel::kVectors, kRows = kDigits == 3 ? 3 : 6;  // more sums do not fit into registers
  LaneRows<encoding, kDigits> lanes(num_rows, num_blocks, kRows);
  for (int64_t first = 0; first < num_rows; first += lanes.step()) {
    const int64_t rows = smaller(lanes.step(), num_rows - first);
    if (!lanes.set(x + first * num_blocks * kBlockSize, rows, executor)) return false;
    const auto multiply = [&](Panel panel, int64_t o, int64_t columns) {
      for_few_rows<kRows>(rows, [&](auto count, int64_t r) {
        constexpr int kX = decltype(count)::value;
        F total[kX][kVectors];
        panel_sums<encoding, kDigits>(total, panel, lanes.row(r), num_blocks);
        T* to = out + (first + r) * out_features + o;
        if (columns < Panel::kRows) {
          for (int i = 0; i < kX; ++i, to += out_features) {
            for_vectors(columns, [&](int64_t c, auto n) { store(to + c, total[i][c / kLanes], n); });
          }
          return;
        }
#pragma GCC unroll 8
        for (int i = 0; i < kX; ++i) {
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) Simd::store(to + i * out_features + v * kLanes, total[i][v]);
        }
      });
    };
    const double of_rows = (kDigits == 3 ? 0.22 : 0.1) * static_cast<double>(rows);
    parallel_for(
        executor, out_features, static_cast<double>(num_blocks) * (1.1 + of_rows),
        [&](int64_t begin, int64_t end) {
          Scratch scratch(Panel::floats(num_blocks));
          const Panel panel{scratch.data()};
          for_panels(panel, begin, end, [&](int64_t o, int64_t columns) { multiply(panel, o, columns); });
        },
        Panel::kRows);
  }
  return true;
}

}  // namespace
}  // namespace eqxcallback::cpu
