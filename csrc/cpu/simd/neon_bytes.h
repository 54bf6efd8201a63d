// Products of signed bytes by the dot products of ARMv8.2. simd/avx512_bytes.h says what each function means.
#pragma once

#include "cpu/simd/neon.h"

#define EQXCALLBACK_BYTES

namespace eqxcallback::cpu {
namespace {

struct Bytes {
  using F = Simd::F;
  using Ints = Simd::Ints;
  static constexpr int32_t kTooHigh = 0;
  static Ints as_weights(Ints x) { return x; }

  static Ints load(const void* p) { return as_ints(vld1q_u8(static_cast<const uint8_t*>(p))); }
  using Mask = int64_t;
  static Mask first(int64_t n) { return n; }
  static Ints load(const void* p, Mask n) {
    Ints x{};
    std::memcpy(&x, p, static_cast<size_t>(n));
    return x;
  }
  static void store(int32_t* p, Ints x) { std::memcpy(p, &x, sizeof(x)); }
  static void store_lowest(int8_t* p, Ints x) {
    const auto lowest = __builtin_convertvector(x, int8_t __attribute__((vector_size(4))));
    std::memcpy(p, &lowest, sizeof(lowest));
  }
  static Ints nearest(F x) { return reinterpret_cast<Ints>(vcvtnq_s32_f32(x)); }
  static int32_t sum(Ints x) { return vaddvq_s32(reinterpret_cast<int32x4_t>(x)); }

  static constexpr int kRows = 1;
  static Ints for_all_rows(const void* p) { return load(p); }
  static Ints load_rows(const uint8_t* const* rows, int64_t offset) { return load(rows[0] + offset); }
  static F scales(const uint8_t* const* rows, int64_t offset) { return Simd::broadcast(Simd::half(rows[0] + offset)); }
  static F floats(const uint8_t* const* rows, int64_t offset) {
    float value;
    std::memcpy(&value, rows[0] + offset, sizeof(value));
    return Simd::broadcast(value);
  }
  using Minimums = Simd::Minimums;
  static Minimums no_minimums() { return Simd::no_minimums(); }
  static F scales_and_minimums(const uint8_t* const* rows, int64_t offset, const float* factor, Minimums& minimums) {
    return Simd::scale_and_minimum(rows[0] + offset, factor, minimums);
  }
  static float total(Minimums minimums, int) { return Simd::total(minimums); }

  static constexpr int kBlocks = 1, kParts = 2;
  template <Encoding encoding>
  static Ints of_blocks(const uint8_t* const* blocks, int part) {
    if constexpr (encoding == Encoding::kQ4_1) {
      const uint8x16_t both = vld1q_u8(blocks[0] + 4);
      return as_ints(part == 0 ? vandq_u8(both, vdupq_n_u8(15)) : vshrq_n_u8(both, 4));
    } else {
      return load(blocks[0] + (encoding >= Encoding::kPlain ? 0 : 2) + 16 * part);
    }
  }

 private:
  static Ints as_ints(uint8x16_t x) { return reinterpret_cast<Ints>(x); }
};

}  // namespace
}  // namespace eqxcallback::cpu
