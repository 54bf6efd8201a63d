// GGUF blocks to f32: in registers, and a row of them in memory.
#pragma once

#include "cpu/kernels/common.h"

namespace eqxcallback::cpu {
namespace {

// Decodes one block: kBlockSize floats, without the scale and minimum of Q4_1.
template <Encoding encoding, class Body>
void for_block_vectors(const uint8_t* block, const Body& body) {
  if constexpr (encoding == Encoding::kQ4_1) {
    for (int i = 0; i < kBlockSize / 2; i += kLanes) {
      body(i, Simd::low_nibbles(block + 4 + i));
      body(kBlockSize / 2 + i, Simd::high_nibbles(block + 4 + i));
    }
  } else {
    for (int i = 0; i < kBlockSize; i += kLanes) body(i, Simd::int8s(block + 2 + i));
  }
}

template <Encoding encoding>
void decode_row(float* out, const uint8_t* blocks, int64_t num_blocks) {
  constexpr float kOne[2] = {0, 1};
  for (int64_t b = 0; b < num_blocks; ++b, blocks += block_bytes(encoding), out += kBlockSize) {
    F scale, minimum = Simd::zero();
    if constexpr (encoding == Encoding::kQ4_1) {
      Simd::Minimums minimums = Simd::no_minimums();
      scale = Simd::scale_and_minimum(blocks, kOne, minimums);
      minimum = Simd::broadcast(Simd::total(minimums));
    } else {
      scale = Simd::broadcast(Simd::half(blocks));
    }
    for_block_vectors<encoding>(blocks,
                                [&](int i, F weights) { Simd::store(out + i, Simd::fma(weights, scale, minimum)); });
  }
}

}  // namespace
}  // namespace eqxcallback::cpu
