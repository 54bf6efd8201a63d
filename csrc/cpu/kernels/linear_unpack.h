// GGUF blocks in one simple form, a few rows at a time in cache: 32 small integers, a scale or two, and a minimum.
// Kernels take Q4_1 and Q8_0 as they are in memory, and other encodings in this form.
#pragma once

#include "cpu/kernels/common.h"

namespace eqxcallback::cpu {
namespace {

// Weight j is scale * (digits[j] - kTooHighPlain) + minimum. kPlainHalves has two scales, of 16 weights each, and no
// minimum.
struct PlainBlock {
  uint8_t digits[kBlockSize];
  float scale[2], minimum, unused;
};
static_assert(sizeof(PlainBlock) == block_bytes(Encoding::kPlain));
inline constexpr int kTooHighPlain = 32;  // so that digits are from 0 to 63

constexpr bool is_packed(Encoding encoding) { return encoding >= Encoding::kQ4_0 && encoding <= Encoding::kQ6_K; }
constexpr bool is_plain(Encoding encoding) { return encoding >= Encoding::kPlain; }
// Returns the encoding that kernels get in place of an encoding.
constexpr Encoding unpacked(Encoding encoding) {
  return !is_packed(encoding) ? encoding : encoding == Encoding::kQ6_K ? Encoding::kPlainHalves : Encoding::kPlain;
}

inline void put_head(PlainBlock& out, float scale, float minimum = 0) {
  out.scale[0] = out.scale[1] = scale, out.minimum = minimum;
}

// Reads the 6 bits of the scale and of the minimum of sub-block j of 8, in Q4_K and Q5_K.
inline void put_k_head(PlainBlock& out, const uint8_t* heads, const uint8_t* packed, int j) {
  const int scale = j < 4 ? packed[j] & 63 : (packed[j + 4] & 15) | (packed[j - 4] >> 6 << 4);
  const int minimum = j < 4 ? packed[j + 4] & 63 : (packed[j + 4] >> 4) | (packed[j] >> 6 << 4);
  put_head(out, Simd::half(heads) * static_cast<float>(scale), -(Simd::half(heads + 2) * static_cast<float>(minimum)));
}

// Vectors that compilers know on every processor, as they leave short loops over bytes as loops.
using Sixteen = uint8_t __attribute__((vector_size(16)));
inline Sixteen load_sixteen(const uint8_t* p) {
  Sixteen x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}
inline void store_sixteen(uint8_t* p, Sixteen x) { std::memcpy(p, &x, sizeof(x)); }
// Returns bytes: all bits of byte i are bit i of two bytes.
inline Sixteen sixteen_bits(const uint8_t* p) {
  constexpr Sixteen kFirst = {1, 2, 4, 8, 16, 32, 64, 128},
                    kSecond = {0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 4, 8, 16, 32, 64, 128};
  return reinterpret_cast<Sixteen>((((Sixteen{} + p[0]) & kFirst) | ((Sixteen{} + p[1]) & kSecond)) != 0);
}

// Unpacks a block: of 32 weights to one PlainBlock, of 256 weights to eight.
template <Encoding encoding>
void unpack(PlainBlock* __restrict out, const uint8_t* __restrict block) {
  if constexpr (encoding == Encoding::kQ4_0 || encoding == Encoding::kQ5_0 || encoding == Encoding::kQ5_1) {
    constexpr bool kHasHigh = encoding != Encoding::kQ4_0;
    constexpr int kHead = encoding == Encoding::kQ5_1 ? 4 : 2;
    constexpr int kMiddle = encoding == Encoding::kQ5_1 ? 0 : kHasHigh ? 16 : 8;
    put_head(*out, Simd::half(block), encoding == Encoding::kQ5_1 ? Simd::half(block + 2) : 0);
    const auto nibbles = load_sixteen(block + kHead + (kHasHigh ? 4 : 0));
    Sixteen first = nibbles & 15, second = nibbles >> 4;
    if constexpr (kHasHigh) first |= sixteen_bits(block + kHead) & 16, second |= sixteen_bits(block + kHead + 2) & 16;
    constexpr uint8_t kOffset = kTooHighPlain - kMiddle;
    store_sixteen(out->digits, first + kOffset), store_sixteen(out->digits + 16, second + kOffset);
  } else if constexpr (encoding == Encoding::kQ6_K) {
    const float scale = Simd::half(block + 208);
    const auto* scales = reinterpret_cast<const int8_t*>(block + 192);
    for (int j = 0; j < 8; ++j) {
      out[j].minimum = 0;
      for (int h = 0; h < 2; ++h) out[j].scale[h] = scale * static_cast<float>(scales[2 * j + h]);
    }
    static_assert(kTooHighPlain == 32);
    for (int half = 0; half < 2; ++half, out += 4) {
      const uint8_t *low = block + 64 * half, *high = block + 128 + 32 * half;
      for (int i = 0; i < kBlockSize; ++i) {
        out[0].digits[i] = static_cast<uint8_t>((low[i] & 15) | (high[i] << 4 & 48));
        out[1].digits[i] = static_cast<uint8_t>((low[32 + i] & 15) | (high[i] << 2 & 48));
        out[2].digits[i] = static_cast<uint8_t>((low[i] >> 4) | (high[i] & 48));
        out[3].digits[i] = static_cast<uint8_t>((low[32 + i] >> 4) | (high[i] >> 2 & 48));
      }
    }
  } else {
    constexpr bool kHasHigh = encoding == Encoding::kQ5_K;
    for (int j = 0; j < 8; ++j) put_k_head(out[j], block, block + 4, j);
    const uint8_t *high = block + 16, *nibbles = block + (kHasHigh ? 48 : 16);
    for (int j = 0; j < 8; j += 2, nibbles += 32) {
      for (int i = 0; i < kBlockSize; ++i) {
        int first = nibbles[i] & 15, second = nibbles[i] >> 4;
        if constexpr (kHasHigh) {
          first |= (high[i] >> j & 1) << 4;
          second |= (high[i] >> (j + 1) & 1) << 4;
        }
        out[j].digits[i] = static_cast<uint8_t>(first + kTooHighPlain);
        out[j + 1].digits[i] = static_cast<uint8_t>(second + kTooHighPlain);
      }
    }
  }
}

// Calls body(rows, first, last) for the rows of weights from `begin` to `end`. Row `first` is at `rows`, unpacked: at
// most kRows of them, which stay in the cache.
template <Encoding encoding, int64_t kRows = 8, class Body>
void for_unpacked_rows(const uint8_t* blocks, int64_t in_features, int64_t begin, int64_t end, const Body& body) {
  constexpr int64_t kWeights = weights_of_block(encoding), kBytes = block_bytes(encoding);
  const int64_t num_blocks = in_features / kWeights;
  if constexpr (is_packed(encoding)) {
    constexpr int64_t kPlainBlocks = kWeights / kBlockSize, kFloats = sizeof(PlainBlock) / sizeof(float);
    Scratch scratch(kRows * num_blocks * kPlainBlocks * kFloats);
    for (int64_t first = begin; first < end; first += kRows) {
      const int64_t last = smaller(end, first + kRows);
      auto* out = reinterpret_cast<PlainBlock*>(scratch.data());
      const uint8_t* block = blocks + first * num_blocks * kBytes;
      for (int64_t i = 0; i < (last - first) * num_blocks; ++i, block += kBytes, out += kPlainBlocks) {
        unpack<encoding>(out, block);
      }
      body(reinterpret_cast<const uint8_t*>(scratch.data()), first, last);
    }
  } else {
    body(blocks + begin * num_blocks * kBytes, begin, end);
  }
}

}  // namespace
}  // namespace eqxcallback::cpu
