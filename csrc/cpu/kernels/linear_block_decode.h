// GGUF blocks to f32: in registers, and a row of them in memory.
#pragma once

#include "cpu/kernels/linear_unpack.h"

namespace eqxcallback::cpu {
namespace {

// Decodes one block: kBlockSize floats, without scales and minimums.
template <Encoding encoding, class Body>
void for_block_vectors(const uint8_t* block, const Body& body) {
  if constexpr (encoding == Encoding::kQ4_1) {
    for (int i = 0; i < kBlockSize / 2; i += kLanes) {
      body(i, Simd::low_nibbles(block + 4 + i));
      body(kBlockSize / 2 + i, Simd::high_nibbles(block + 4 + i));
    }
  } else if constexpr (is_plain(encoding)) {
    const F too_high = Simd::broadcast(kTooHighPlain);
    for (int i = 0; i < kBlockSize; i += kLanes) body(i, Simd::sub(Simd::int8s(block + i), too_high));
  } else {
    for (int i = 0; i < kBlockSize; i += kLanes) body(i, Simd::int8s(block + 2 + i));
  }
}

// Decodes one block to its weights, with scale and minimum.
template <Encoding encoding, class Vectors = Simd, class Body>  // a parameter, as not all of them have tables
void for_weight_vectors(const uint8_t* block, const Body& body) {
  if constexpr (encoding == Encoding::kQ4_1 && kLanes == 16) {  // as many as a nibble has values: a table of them
    const F table = Vectors::table_of_nibbles(block);
    body(0, Vectors::low_nibbles(block + 4, table));
    body(kBlockSize / 2, Vectors::high_nibbles(block + 4, table));
  } else if constexpr (encoding == Encoding::kQ4_1) {
    constexpr float kOne[2] = {0, 1};
    Simd::Minimums minimums = Simd::no_minimums();
    const F scale = Simd::scale_and_minimum(block, kOne, minimums);
    const F minimum = Simd::broadcast(Simd::total(minimums));
    for_block_vectors<encoding>(block, [&](int i, F digits) { body(i, Simd::fma(digits, scale, minimum)); });
  } else if constexpr (is_plain(encoding)) {
    const auto& head = *reinterpret_cast<const PlainBlock*>(block);
    const F minimum = Simd::broadcast(head.minimum);
    for_block_vectors<encoding>(block, [&](int i, F digits) {
      const F scale = Simd::broadcast(head.scale[encoding == Encoding::kPlainHalves ? i / 16 : 0]);
      body(i, encoding == Encoding::kPlainHalves ? Simd::mul(digits, scale) : Simd::fma(digits, scale, minimum));
    });
  } else {
    const F scale = Simd::broadcast(Simd::half(block));
    for_block_vectors<encoding>(block, [&](int i, F digits) { body(i, Simd::mul(digits, scale)); });
  }
}

template <Encoding encoding>
void decode_row(float* out, const uint8_t* row, int64_t in_features) {
  for (int64_t b = 0; b < in_features; b += weights_of_block(encoding), row += block_bytes(encoding)) {
    const auto decode = [&](const uint8_t* block, int64_t at) {
      for_weight_vectors<unpacked(encoding)>(block, [&](int i, F weights) { Simd::store(out + at + i, weights); });
    };
    if constexpr (is_packed(encoding)) {
      PlainBlock blocks[weights_of_block(encoding) / kBlockSize];
      unpack<encoding>(blocks, row);
      for (const PlainBlock& block : blocks) {
        decode(reinterpret_cast<const uint8_t*>(&block), b + (&block - blocks) * kBlockSize);
      }
    } else {
      decode(row, b);
    }
  }
}

}  // namespace
}  // namespace eqxcallback::cpu
