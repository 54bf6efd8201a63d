// How products by tensor cores read weights in GGUF blocks: parts of rows as they are copied to shared memory, and
// digits as exact numbers of 16 bits. See quantized_codes.cuh for what is in a block.
#ifndef EQXCALLBACK_QUANTIZED_PACKED_CUH
#define EQXCALLBACK_QUANTIZED_PACKED_CUH

#include "../ptx.cuh"
#include "quantized_codes.cuh"

namespace eqxcallback {

// Two numbers of a word less two of another.
template <typename Pair>
__device__ inline unsigned subtract(unsigned word, unsigned other) {
  Pair values, offsets;
  memcpy(static_cast<void*>(&values), &word, sizeof(word));
  memcpy(static_cast<void*>(&offsets), &other, sizeof(other));
  values = __hsub2(values, offsets);
  memcpy(&word, static_cast<const void*>(&values), sizeof(word));
  return word;
}

// Bytes 0 and 2 of a word as two numbers of T. Those of digits, whose mask says how many bits they have, are cheaper
// with an offset, or in another unit.
template <typename T>
struct Integers;
template <>
struct Integers<__nv_bfloat16> {
  using Pair = __nv_bfloat162;
  static constexpr unsigned kUnits = 0x43004300u;  // numbers that end in their unit, 128, twice
  // The last bits of such a number, 128 + q.
  static constexpr float kUnit = 1.0f, kOffset = 128.0f;
  __device__ static unsigned of_digits(unsigned word, unsigned mask) { return and_or(word, mask, kUnits); }
  // 128 and the low seven bits, less 128 or, if the sign bit is set, 256.
  __device__ static unsigned of_int8(unsigned word) {
    return subtract<Pair>(of_digits(word, 0x007f007fu), of_digits(word, 0x00800080u));
  }
};
template <>
struct Integers<__half> {
  using Pair = __half2;
  static constexpr unsigned kUnits = 0x64006400u;  // 1024
  // The last bits of a number without an exponent.
  static constexpr float kUnit = 1.0f / 16777216.0f, kOffset = 0.0f;
  __device__ static unsigned of_digits(unsigned word, unsigned mask) { return word & mask; }
  // 1024 + 128 and the byte, less these.
  __device__ static unsigned of_int8(unsigned word) {
    constexpr unsigned kOffsets = 0x64806480u;
    return subtract<Pair>((word & 0x00ff00ffu) ^ kOffsets, kOffsets);
  }
};

// Bytes 0 and 2 of a word, of which digits have kBits, less half of their range.
template <typename T, int kBits>
__device__ inline unsigned centred(unsigned word) {
  constexpr unsigned kBoth = 0x00010001u, kMask = ((1u << kBits) - 1) * kBoth, kHalf = (1u << (kBits - 1)) * kBoth;
  constexpr unsigned kUnits = Integers<T>::kUnits;
  return subtract<typename Integers<T>::Pair>(and_or(word, kMask, kUnits), kUnits + kHalf);
}

// A quarter of 32 weights, which a lane has: eight digits in pairs, the first and third of four and the second and
// fourth, then those of the other four. A weight is scale * digit + minimum; if each 16 have a scale, that of the other
// four is `second`.
struct Digits {
  unsigned pairs[4];
  float scale, second, minimum;

  // Of digits of Integers<T>.
  template <typename T>
  __device__ void set(float of_digit, float least) {
    scale = of_digit / Integers<T>::kUnit;
    minimum = least - Integers<T>::kOffset * of_digit;
  }
};

// A part of a row, 128 features: kPacks packs of kPack bytes, which are copied at once. `from` says where in a row of
// weights they are; two parts on each is 2 * kRowBytes further. kAcross lanes have a row's first packs, and one lane
// the others, which follow each other. In shared memory rows are kStride apart, for other banks, and `read` takes one
// there, and which 32 features. `features` takes those of x, whose packs may be in another order. A multiprocessor has
// the registers of so many `blocks` of 4 warps, if with few rows of x kUnrolled steps are under way.
//
// Where packs begin at multiples of their size, `pack_at`, `bytes` and `shift` do nothing: see Q6_K.
template <int kOfPart, int kOfPack, long long kOfRow>
struct Part {
  static constexpr int kPacks = kOfPart, kPack = kOfPack, kAcross = kPacks >= 16 ? 16 : kPacks >= 8 ? 8 : 4;
  static constexpr long long kRowBytes = kOfRow;
  static constexpr bool kHasMinimum = true, kTwoScales = false;

  __device__ static const unsigned char* pack_at(const unsigned char* from) { return from; }
  __device__ static unsigned bytes(int, const unsigned char*) { return kPack; }
  __device__ static int shift(int, int) { return 0; }
};

template <Encoding encoding>
struct Packed;

// Features 4 * quarter .. + 3 of 32, and 16 + 4 * quarter .. + 3.
__device__ inline uint4 features_16_apart(const void* x, int step, int quarter, int swizzle) {
  const int pack = 4 * step + quarter / 2, half = quarter % 2;
  const uint2* const of_row = static_cast<const uint2*>(x);
  const uint2 low = of_row[2 * (pack ^ swizzle) + half], high = of_row[2 * ((pack + 2) ^ swizzle) + half];
  return make_uint4(low.x, low.y, high.x, high.y);
}

// 8 * quarter .. + 7.
__device__ inline uint4 features_in_order(const void* x, int step, int quarter, int swizzle) {
  return static_cast<const uint4*>(x)[(4 * step + quarter) ^ swizzle];
}

// A part is four blocks of 32 weights.
template <int kOfPart, int kOfPack>
struct Packed32 : Part<kOfPart, kOfPack, kOfPart * kOfPack> {
  static constexpr int kUnrolled = 4;

  static constexpr int blocks(int row_tiles) { return row_tiles == 8 ? 2 : row_tiles == 4 ? 3 : 4; }
  __device__ static long long from(int part, int pack) { return part * (kOfPart * kOfPack) + pack * kOfPack; }
  // Those whose digits are in the low halves of four bytes, and those in the high ones.
  __device__ static uint4 features(const void* x, int step, int quarter, int swizzle) {
    return features_16_apart(x, step, quarter, swizzle);
  }
};

template <>
struct Packed<Q4_1> : Packed32<5, 16> {
  static constexpr int kStride = 112;

  template <typename T>
  __device__ static Digits read(const unsigned char* row, int, int step, int quarter) {
    const unsigned* const words = reinterpret_cast<const unsigned*>(row + 20 * step);
    const unsigned both = words[0], digits = words[1 + quarter];
    Digits result;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      result.pairs[i] = Integers<T>::of_digits(digits >> (i / 2 * 4 + i % 2 * 8), 0x000f000fu);
    }
    result.set<T>(half_of(static_cast<unsigned short>(both)), half_of(static_cast<unsigned short>(both >> 16)));
    return result;
  }
};

template <>
struct Packed<Q8_0> : Packed32<17, 8> {
  static constexpr int kStride = 144;
  static constexpr bool kHasMinimum = false;

  template <typename T>
  __device__ static Digits read(const unsigned char* row, int, int step, int quarter) {
    const unsigned char* const block = row + 34 * step;
    const uint2 both = eight_at(block + 2 + 8 * quarter);
    Digits result;
#pragma unroll
    for (int i = 0; i < 4; ++i) result.pairs[i] = Integers<T>::of_int8((i < 2 ? both.x : both.y) >> i % 2 * 8);
    result.scale = half_at(block);
    return result;
  }
  __device__ static uint4 features(const void* x, int step, int quarter, int swizzle) {
    return features_in_order(x, step, quarter, swizzle);
  }
};

// A part is half of a block of 256 weights: the packs before its digits, kHead, and a half of these.
template <int kBlockBytes, int kHead>
struct Packed256 : Part<kHead + 4, 16, kBlockBytes / 2> {
  static constexpr int kUnrolled = 2;

  static constexpr int blocks(int row_tiles) { return row_tiles == 4 ? 2 : row_tiles == 2 ? 3 : 4; }
  __device__ static long long from(int part, int pack) {
    return static_cast<long long>(part / 2) * kBlockBytes + pack * 16 + (pack < kHead ? 0 : part % 2 * 64);
  }
  __device__ static uint4 features(const void* x, int step, int quarter, int swizzle) {
    return features_in_order(x, step, quarter, swizzle);
  }
};

template <>
struct Packed<Q4_K> : Packed256<144, 1> {
  static constexpr int kStride = 96;

  template <typename T>
  __device__ static Digits read(const unsigned char* row, int part, int step, int quarter) {
    const uint2 digits = *reinterpret_cast<const uint2*>(row + 16 + step / 2 * 32 + 8 * quarter);
    const int by = 4 * (step % 2);
    Digits result;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      result.pairs[i] = Integers<T>::of_digits((i < 2 ? digits.x : digits.y) >> (by + i % 2 * 8), 0x000f000fu);
    }
    const Scales of(row, part % 2 * 4 + step);
    result.set<T>(of.scale, of.minimum);
    return result;
  }
};

template <>
struct Packed<Q5_K> : Packed256<176, 3> {
  static constexpr int kStride = 160;

  template <typename T>
  __device__ static Digits read(const unsigned char* row, int part, int step, int quarter) {
    const uint2 bits = *reinterpret_cast<const uint2*>(row + 16 + 8 * quarter);
    const uint2 digits = *reinterpret_cast<const uint2*>(row + 48 + step / 2 * 32 + 8 * quarter);
    const int by = 4 * (step % 2), eighth = part % 2 * 4 + step;
    Digits result;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned low = (i < 2 ? digits.x : digits.y) >> (by + i % 2 * 8) & 0x000f000fu;
      const unsigned fifth = (i < 2 ? bits.x : bits.y) >> (eighth + i % 2 * 8) & 0x00010001u;
      result.pairs[i] = Integers<T>::of_digits(low | fifth << 4, 0x001f001fu);
    }
    const Scales of(row, eighth);
    result.set<T>(of.scale, of.minimum);
    return result;
  }
};

// A block has 210 bytes, so it begins at any even address. Each run of its bytes, 64 of digits, 32 of high bits, 8
// scales, or 16, and the block's, is copied from the multiple of 16 before it on: so the runs begin in shared memory at
// packs 0, 5 and 8, all by the same `shift` later. The last pack ends with the block, which may be the last in memory.
template <>
struct Packed<Q6_K> : Part<10, 16, 105> {
  static constexpr int kStride = 176, kUnrolled = 2;
  static constexpr bool kHasMinimum = false, kTwoScales = true;

  static constexpr int blocks(int row_tiles) { return row_tiles == 4 ? 2 : row_tiles == 2 ? 3 : 4; }
  __device__ static long long from(int part, int pack) {
    const int run = pack < 5 ? part % 2 * 64 : pack < 8 ? 128 - 5 * kPack + part % 2 * 32 : 192 - 8 * kPack;
    return part / 2 * (2 * kRowBytes) + run + pack * kPack;
  }
  __device__ static unsigned over(const unsigned char* from) {
    return static_cast<unsigned>(reinterpret_cast<unsigned long long>(from)) % 16;
  }
  __device__ static const unsigned char* pack_at(const unsigned char* from) { return from - over(from); }
  __device__ static unsigned bytes(int pack, const unsigned char* from) {
    return pack == kPacks - 1 ? 2 + over(from) : kPack;
  }
  __device__ static int shift(int begin, int part) { return (begin + part / 2 * 210) % 16; }
  template <typename T>
  __device__ static Digits read(const unsigned char* row, int part, int step, int quarter) {
    Digits result;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned digits = four_at(row + step % 2 * 32 + half * 16 + 4 * quarter);
      const unsigned bits = four_at(row + 5 * kPack + half * 16 + 4 * quarter);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const unsigned low = digits >> (step / 2 * 4 + i * 8) & 0x000f000fu;
        const unsigned high = bits >> (2 * step + i * 8) & 0x00030003u;
        result.pairs[2 * half + i] = centred<T, 6>(low | high << 4);
      }
    }
    const unsigned char* const scales = row + 8 * kPack;
    const unsigned both = *reinterpret_cast<const unsigned short*>(scales + part % 2 * 8 + 2 * step);
    const float of_block = half_at(scales + 16);
    result.scale = of_block * static_cast<float>(static_cast<signed char>(both & 0xff));
    result.second = of_block * static_cast<float>(static_cast<signed char>(both >> 8));
    return result;
  }
  __device__ static uint4 features(const void* x, int step, int quarter, int swizzle) {
    return features_16_apart(x, step, quarter, swizzle);
  }
};

template <>
struct Packed<Q4_0> : Packed32<9, 8> {
  static constexpr int kStride = 80;
  static constexpr bool kHasMinimum = false;

  template <typename T>
  __device__ static Digits read(const unsigned char* row, int, int step, int quarter) {
    const unsigned char* const block = row + 18 * step;
    const unsigned digits = four_at(block + 2 + 4 * quarter);
    Digits result;
#pragma unroll
    for (int i = 0; i < 4; ++i) result.pairs[i] = centred<T, 4>(digits >> (i / 2 * 4 + i % 2 * 8));
    result.scale = half_at(block);
    return result;
  }
};

// Four bytes with digits of five bits: those of features 4 * quarter .. + 3, or, one half of the bytes and 16 features
// later, the others.
__device__ inline unsigned with_fifths(unsigned digits, unsigned bits, int half, int quarter) {
  return (digits >> 4 * half & 0x0f0f0f0fu) | fifths(bits, 16 * half + 4 * quarter) << 4;
}

template <>
struct Packed<Q5_0> : Packed32<11, 8> {
  static constexpr int kStride = 112;
  static constexpr bool kHasMinimum = false;

  template <typename T>
  __device__ static Digits read(const unsigned char* row, int, int step, int quarter) {
    const unsigned char* const block = row + 22 * step;
    const unsigned bits = four_at(block + 2), digits = four_at(block + 6 + 4 * quarter);
    Digits result;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      result.pairs[i] = centred<T, 5>(with_fifths(digits, bits, i / 2, quarter) >> i % 2 * 8);
    }
    result.scale = half_at(block);
    return result;
  }
};

template <>
struct Packed<Q5_1> : Packed32<6, 16> {
  static constexpr int kStride = 112;

  template <typename T>
  __device__ static Digits read(const unsigned char* row, int, int step, int quarter) {
    const unsigned* const words = reinterpret_cast<const unsigned*>(row + 24 * step);
    const unsigned both = words[0], bits = words[1], digits = words[2 + quarter];
    Digits result;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      result.pairs[i] = Integers<T>::of_digits(with_fifths(digits, bits, i / 2, quarter) >> i % 2 * 8, 0x001f001fu);
    }
    result.template set<T>(half_of(static_cast<unsigned short>(both)),
                           half_of(static_cast<unsigned short>(both >> 16)));
    return result;
  }
};

}  // namespace eqxcallback

#endif  // EQXCALLBACK_QUANTIZED_PACKED_CUH
