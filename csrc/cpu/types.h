// Element types that C++ has no name for, and the storage of quantised weights.
#pragma once

#include <cstdint>
#include <cstring>

namespace eqxcallback::cpu {

enum class Element : uint8_t { kF32, kBf16, kF16 };

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

// GGUF's block encodings: 32 or 256 weights of one row share a block.
enum class Encoding : uint8_t {
  kQ4_1,  // f16 scale d, f16 minimum m, 16 bytes; weight j = d * (low nibble of byte j) + m, weight 16 + j: the high
          // one
  kQ8_0,  // f16 scale d, 32 int8; weight j = d * q_j
  // Encodings that are first unpacked into cache, see cpu/kernels/linear_unpack.h.
  kQ4_0,
  kQ5_0,
  kQ5_1,
  kQ4_K,
  kQ5_K,
  kQ6_K,
  // The first two with 16 rows side by side. Of each block in turn: 16 f16 scales, Q4_1's 16 f16 minimums, and 4 or 8
  // times 16 dwords, of each row the next four of its bytes.
  kQ4_1_R16,
  kQ8_0_R16,
  // The form that they are unpacked to, which callers never have.
  kPlain,
  kPlainHalves,
};
inline constexpr int64_t kBlockSize = 32;  // weights that kernels take at a time
inline constexpr int64_t kGroupRows = 16;  // rows side by side in the encodings _R16

// The files that are compiled for one instruction set include these functions. None of them may have external linkage:
// the linker would keep one copy for all tables, perhaps the one with the newest instructions.
namespace {

constexpr int64_t block_bytes(Encoding encoding) {
  constexpr int64_t kBytes[] = {20, 34, 18, 22, 24, 144, 176, 210, 20, 34, 48, 48};
  return kBytes[static_cast<int>(encoding)];
}
constexpr int64_t weights_of_block(Encoding encoding) {
  return encoding >= Encoding::kQ4_K && encoding <= Encoding::kQ6_K ? 256 : 32;
}
constexpr bool is_interleaved(Encoding encoding) {
  return encoding == Encoding::kQ4_1_R16 || encoding == Encoding::kQ8_0_R16;
}

inline float to_float(float value) { return value; }

inline float to_float(Bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

inline float to_float(F16 value) {
  const uint32_t sign = (value.bits & 0x8000u) << 16, magnitude = value.bits & 0x7fffu;
  uint32_t bits = magnitude << 13;
  if (magnitude >= 0x7c00u) {
    bits |= 0x7f800000u;  // infinite, or a NaN
  } else if (magnitude >= 0x400u) {
    bits += 112u << 23;
  } else {  // by integers, as a subnormal f32 may count as zero on XLA's threads
    const float small = static_cast<float>(magnitude) * 0x1p-24f;
    std::memcpy(&bits, &small, sizeof(bits));
  }
  bits |= sign;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

inline void from_float(float value, float& out) { out = value; }

// Rounds to nearest, ties to even.
inline void from_float(float value, Bf16& out) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  out.bits = static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Rounds in the same way.
inline void from_float(float value, F16& out) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  uint32_t result;
  if (magnitude > 0x7f800000u) {
    result = 0x7e00u | (magnitude >> 13 & 0x1ffu);
  } else if (magnitude >= 0x477ff000u) {  // a value that rounds to 65536 is infinite
    result = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {
    result = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  } else {  // subnormal: the last bit of the sum is that of the result
    float small;
    std::memcpy(&small, &magnitude, sizeof(small));
    small += 0.5f;
    std::memcpy(&result, &small, sizeof(result));
    result -= 0x3f000000u;
  }
  out.bits = static_cast<uint16_t>(sign | result);
}

constexpr int64_t bytes_of(Element element) { return element == Element::kF32 ? 4 : 2; }

template <class T>
constexpr T smaller(T a, T b) {
  return b < a ? b : a;
}
template <class T>
constexpr T larger(T a, T b) {
  return a < b ? b : a;
}

}  // namespace
}  // namespace eqxcallback::cpu
