// Rows of x, as digits, times weights side by side, that are so or are put so: by tiles of bytes, if the processor has
// them and rows are enough, or by vectors.
#pragma once

#include "cpu/kernels/linear_digit_panels.h"
#include "cpu/kernels/linear_interleaved_bytes.h"
#ifdef EQXCALLBACK_TILES
#include "cpu/kernels/linear_byte_tiles.h"
#endif

namespace eqxcallback::cpu {
namespace {

// multiply_digit_panels says what these are. `for_panels` takes any panel.
template <Encoding encoding, int kDigits, class T, class ForPanels>
bool multiply_side_by_side(T* out, const float* x, int64_t num_rows, int64_t out_features, int64_t num_blocks,
                           const Executor& executor, const ForPanels& for_panels) {
#ifdef EQXCALLBACK_TILES
  if constexpr (DigitPanel<encoding>::kHalves == 1) {
    if (num_rows >= kFewestOfTiles<kDigits>) {
      return multiply_tile_panels<encoding, kDigits>(out, x, num_rows, out_features, num_blocks, executor, for_panels);
    }
  }
#endif
  return multiply_digit_panels<encoding, kDigits>(out, x, num_rows, out_features, num_blocks, executor, for_panels);
}

template <Encoding encoding, int kDigits, class T>
bool multiply_panels_of_blocks(const QuantizedLinear& args, const float* x, const Executor& executor) {
  using Panel = DigitPanel<unpacked(encoding)>;  // the same rows with and without signs
  const int64_t num_blocks = args.in_features / kBlockSize, stride = num_blocks * block_bytes(unpacked(encoding));
  const auto for_panels = [&](auto panel, int64_t begin, int64_t end, const auto& multiply) {
    for_unpacked_rows<encoding, Panel::kRows>(
        args.blocks, args.in_features, begin, end, [&](const uint8_t* blocks, int64_t first, int64_t last) {
          for (int64_t o = first; o < last; o += Panel::kRows, blocks += Panel::kRows * stride) {
            const int64_t rows = smaller(Panel::kRows, last - o);
            panel.set(blocks, rows, num_blocks);
            multiply(o, rows);
          }
        });
  };
  return multiply_side_by_side<unpacked(encoding), kDigits>(static_cast<T*>(args.out), x, args.rows, args.out_features,
                                                            num_blocks, executor, for_panels);
}

// False if x has no form in bytes.
template <Encoding encoding, int kDigits, class T>
bool multiply_groups(const QuantizedLinear& args, const float* x, const Executor& executor) {
#ifdef EQXCALLBACK_TILES
  if (args.rows >= kFewestOfTiles<kDigits>) return multiply_group_tiles<encoding, kDigits, T>(args, x, executor);
#endif
  return multiply_group_digits<encoding, kDigits, T>(args, x, executor);
}

}  // namespace
}  // namespace eqxcallback::cpu
