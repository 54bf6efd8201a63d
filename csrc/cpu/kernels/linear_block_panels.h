// Several rows that are quantised to int8 times rows of GGUF blocks, by the products of bytes of the processor. As
// in linear_byte_panels.h, weights are put along the lanes; but each block has its own scale, and its sums become f32.
#pragma once

#include "cpu/kernels/linear_byte_panels.h"

namespace eqxcallback::cpu {
namespace {

inline constexpr int64_t kBlockFours = kBlockSize / 4;

// Rows of blocks as integers n with x = scale n.
class BlockRows {
 public:
  BlockRows(int64_t num_rows, int64_t num_blocks)
      : num_blocks_(num_blocks), scratch_(num_rows * num_blocks * (kBlockFours + 2) + 1) {
    const int64_t blocks = num_rows * num_blocks;
    integers_ = reinterpret_cast<int8_t*>(scratch_.data());
    scales_ = scratch_.data() + blocks * kBlockFours;
    sums_ = reinterpret_cast<int32_t*>(scales_ + blocks);
  }

  const ByteFour* fours(int64_t r, int64_t b) const {
    return reinterpret_cast<const ByteFour*>(integers_ + (r * num_blocks_ + b) * kBlockSize);
  }
  int64_t stride() const { return num_blocks_ * kBlockFours; }
  float scale(int64_t r, int64_t b) const { return scales_[r * num_blocks_ + b]; }
  // The sum of the integers of block b of row r.
  int32_t sum(int64_t r, int64_t b) const { return sums_[r * num_blocks_ + b]; }

  // Sets row r. Returns false if x is not finite, or so high that sums of it are not.
  bool set(int64_t r, const float* x) {
    for (int64_t i = r * num_blocks_; i < (r + 1) * num_blocks_; ++i, x += kBlockSize) {
      Steps steps;
      if (!steps_of(steps, x, kBlockSize, kSummable)) return false;
      Ints sum{};
      for (int64_t j = 0; j < kBlockSize; j += kLanes) {
        const Ints n = Bytes::nearest(Simd::mul(Simd::load(x + j), Simd::broadcast(steps.inverse)));
        Bytes::store_lowest(integers_ + i * kBlockSize + j, n);
        sum += n;
      }
      scales_[i] = steps.scale;
      sums_[i] = Bytes::sum(sum);
    }
    return true;
  }

 private:
  int64_t num_blocks_;
  Scratch scratch_;
  int8_t* integers_;
  float* scales_;
  int32_t* sums_;
};

// kPanel rows of weights: their bytes [blocks, kBlockFours, kPanel], and scales and minimums [kPanel] of each block.
struct BlockPanel {
  ByteFour* bytes;
  float *scales, *minimums;

  static int64_t floats(int64_t num_blocks) { return (num_blocks + 1) * (kBlockFours + 2) * kPanel; }
  BlockPanel(float* memory, int64_t num_blocks)
      : bytes(reinterpret_cast<ByteFour*>(memory)),
        scales(memory + (num_blocks + 1) * kBlockFours * kPanel),  // blocks may be put there two at a time
        minimums(scales + (num_blocks + 1) * kPanel) {}

  template <Encoding encoding>
  void set(const uint8_t* weights, int64_t rows, int64_t num_blocks) const {
    const int64_t stride = num_blocks * block_bytes(encoding);
    for (int64_t w = 0; w < kPanel; w += kLanes) {
      for (int64_t b = 0; b < num_blocks; b += Bytes::kBlocks) {
        F fours[Bytes::kParts][kLanes];
        for (int r = 0; r < kLanes; ++r) {
          // Results past the last row or block are dropped.
          const uint8_t* row = weights + smaller(w + r, rows - 1) * stride;
          const uint8_t* blocks[Bytes::kBlocks];
          for (int i = 0; i < Bytes::kBlocks; ++i) {
            blocks[i] = row + smaller(b + i, num_blocks - 1) * block_bytes(encoding);
            put_head<encoding>(blocks[i], (b + i) * kPanel + w + r);
          }
          for (int p = 0; p < Bytes::kParts; ++p) {
            fours[p][r] = reinterpret_cast<F>(Bytes::of_blocks<encoding>(blocks, p));
          }
        }
        for (int p = 0; p < Bytes::kParts; ++p) {
          Simd::transpose(fours[p]);
          put_fours(fours[p], b * kBlockFours + p * kLanes, w);
        }
      }
    }
  }

 private:
  void put_fours(const F* fours, int64_t at, int64_t w) const {
    for (int j = 0; j < kLanes; ++j) store_fours(bytes + (at + j) * kPanel + w, fours[j]);
  }
  template <Encoding encoding>
  void put_head(const uint8_t* block, int64_t at) const {
    scales[at] = Simd::half(block);
    if constexpr (encoding == Encoding::kQ4_1) minimums[at] = Simd::half(block + 2);
  }
};

// sums[r, w] of kRows rows of x, from `first` on, and a panel.
template <Encoding encoding, int kRows>
[[gnu::noinline]] void block_tile(float* sums, const BlockRows& x, int64_t first, const BlockPanel& panel,
                                  int64_t num_blocks) {
  constexpr int kVectors = Simd::kOuterVectors;
  F total[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) total[r][v] = Simd::zero();
  }
  for (int64_t b = 0; b < num_blocks; ++b) {
    Ints acc[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const int32_t too_high = encoding == Encoding::kQ8_0 ? Bytes::kTooHigh * x.sum(first + r, b) : 0;
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) acc[r][v] = Ints{} - too_high;
    }
    add_outer(acc, x.fours(first, b), x.stride(), 1, panel.bytes + b * kBlockFours * kPanel, kBlockFours, kPanel);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const F scale = Simd::broadcast(x.scale(first + r, b));
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = b * kPanel + v * kLanes;
        const F dot = Simd::mul(__builtin_convertvector(acc[r][v], F), scale);
        total[r][v] = Simd::fma(dot, Simd::load(panel.scales + at), total[r][v]);
        if constexpr (encoding == Encoding::kQ4_1) {
          const F sum = Simd::broadcast(x.scale(first + r, b) * static_cast<float>(x.sum(first + r, b)));
          total[r][v] = Simd::fma(sum, Simd::load(panel.minimums + at), total[r][v]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) Simd::store(sums + r * kPanel + v * kLanes, total[r][v]);
  }
}

// Returns false if x has no form in bytes.
template <Encoding encoding, class T>
bool multiply_block_panels(const QuantizedLinear& args, const float* x, const Executor& executor) {
  const int64_t num_blocks = args.in_features / kBlockSize, out_features = args.out_features;
  BlockRows rows(args.rows, num_blocks);
  for (int64_t r = 0; r < args.rows; ++r) {
    if (!rows.set(r, x + r * args.in_features)) return false;
  }
  const double nanoseconds = static_cast<double>(num_blocks) * (2.4 + 0.22 * static_cast<double>(args.rows));
  parallel_for(
      executor, out_features, nanoseconds,
      [&](int64_t begin, int64_t end) {
        Scratch scratch(BlockPanel::floats(num_blocks));
        const BlockPanel panel(scratch.data(), num_blocks);
        for (int64_t o = begin; o < end; o += kPanel) {
          const int64_t columns = smaller(kPanel, end - o);
          panel.set<encoding>(args.blocks + o * num_blocks * block_bytes(encoding), columns, num_blocks);
          const auto tile = [&](auto count, int64_t first) {
            constexpr int kRows = decltype(count)::value;
            float sums[kRows * kPanel];
            block_tile<encoding, kRows>(sums, rows, first, panel, num_blocks);
            for (int r = 0; r < kRows; ++r) {
              T* out = static_cast<T*>(args.out) + (first + r) * out_features + o;
              for_vectors(columns, [&](int64_t i, auto n) { store(out + i, Simd::load(sums + r * kPanel + i), n); });
            }
          };
          constexpr int kRows = Simd::kOuterRows / 2;  // with sums of both kinds
          int64_t r = 0;
          for (; r + kRows <= args.rows; r += kRows) tile(Int<kRows>{}, r);
          for (; r < args.rows; ++r) tile(Int<1>{}, r);
        }
      },
      kPanel);
  return true;
}

}  // namespace
}  // namespace eqxcallback::cpu
