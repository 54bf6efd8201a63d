// How the weights in GGUF blocks are read: the values of dequantize, in quarters of 32 weights, whose eight share a
// scale.
//
// Code<encoding> has the weights and bytes of a block, and where among 32 weights the first four of a quarter are, and
// the other four. `read` takes the place where a row of blocks begins, which is even, and which 32 weights of the row.
//
// 32 weights in a block: f16 d; Q4_1 and Q5_1 f16 m; Q5_0 and Q5_1 four bytes of fifth bits; digits. Those of 4 bits
// are 16 bytes with digit i in the low half of byte i, and digit 16 + i in the high one. A weight is d * q + m, d * (q
// - 8) of Q4_0, d * (q - 16) of Q5_0, and d * q of Q8_0, whose 32 q are int8.
//
// 256 weights in a block, eight times 32, two of which are the halves of 32 bytes. Q4_K and Q5_K: f16 d and m, 12 bytes
// with a scale and a minimum of 6 bits for each 32, 32 bytes of fifth bits of Q5_K, digits. Q6_K: 128 bytes of low
// digits, 64 of two high bits each, 16 scales in int8, f16 d; a weight is d * scale * (q - 32).
#ifndef EQXCALLBACK_QUANTIZED_CODES_CUH
#define EQXCALLBACK_QUANTIZED_CODES_CUH

#include "quantized.cuh"

namespace eqxcallback {

// 8 weights, scale * digit + minimum, but for the offset of digits with a minimum.
struct Quarter {
  float digits[8], scale, minimum;
};

template <Encoding encoding>
struct Code;

// Addresses are even: four bytes, and eight as two words from the aligned address before them on and the last two
// bytes.
__device__ inline unsigned four_at(const unsigned char* from) {
  const unsigned short* halves = reinterpret_cast<const unsigned short*>(from);
  return halves[0] | static_cast<unsigned>(halves[1]) << 16;
}
__device__ inline uint2 eight_at(const unsigned char* from) {
  const unsigned odd = reinterpret_cast<unsigned long long>(from) & 2;
  const unsigned* words = reinterpret_cast<const unsigned*>(from - odd);
  const unsigned a = words[0], b = words[1], c = *reinterpret_cast<const unsigned short*>(from + 6);
  return make_uint2(odd ? __byte_perm(a, b, 0x5432u) : a, odd ? __byte_perm(b, c, 0x5432u) : b);
}

// Bits become numbers under the exponent of 1: a digit of some bits is 1 + q / 2^bits, and the scale 2^bits * d. Who
// adds up products subtracts the 1 from their sum: one operation for 8 weights.
template <int kBits>
struct Shifted {
  static constexpr bool kHasMinimum = true;

  // Digits are bytes, whose highest bit is bit 6.
  __device__ static Quarter quarter(unsigned first, unsigned second, float scale, float minimum) {
    Quarter result;
    result.scale = static_cast<float>(1 << kBits) * scale;
    result.minimum = minimum;
    const unsigned low = first | 0x80808080u, high = second | 0x80808080u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned selector = 0x7044u | i << 8;  // the exponent's byte, byte i, two zero bytes
      result.digits[i] = __uint_as_float(__byte_perm(low, 0x3f000000u, selector));
      result.digits[4 + i] = __uint_as_float(__byte_perm(high, 0x3f000000u, selector));
    }
    return result;
  }
  __device__ static float weight(float digit, const Quarter& quarter) {
    return (digit - 1.0f) * quarter.scale + quarter.minimum;
  }
  // What is added for each x, so that the digits need no offset.
  __device__ static float shift(const Quarter& quarter) { return quarter.minimum - quarter.scale; }
};

// A quarter has four bytes, with the digits of 16 weights that are 16 apart in their halves.
template <int kSize, int kBits>
struct Of32 : Shifted<kBits> {
  static constexpr long long kWeights = 32, kBytes = kSize;
  __device__ static int first(int quarter) { return 4 * quarter; }
  __device__ static int second(int quarter) { return 16 + 4 * quarter; }
};

template <>
struct Code<Q4_0> : Of32<18, 4> {
  __device__ static Quarter read(const unsigned char* row, long long part, int quarter) {
    const unsigned char* block = row + part * kBytes;
    const unsigned digits = four_at(block + 2 + 4 * quarter);
    const float scale = half_at(block);
    return Of32::quarter(digits << 3 & 0x78787878u, digits >> 1 & 0x78787878u, scale, -8.0f * scale);
  }
};

template <>
struct Code<Q4_1> : Of32<20, 4> {
  __device__ static Quarter read(const unsigned char* row, long long part, int quarter) {
    const unsigned* words = reinterpret_cast<const unsigned*>(row + part * kBytes);
    const unsigned digits = words[1 + quarter], both = words[0];
    return Of32::quarter(digits << 3 & 0x78787878u, digits >> 1 & 0x78787878u,
                         half_of(static_cast<unsigned short>(both)), half_of(static_cast<unsigned short>(both >> 16)));
  }
};

// The fifth bits of a quarter, in their bytes: `bits` has those of all 32 weights.
__device__ inline unsigned fifths(unsigned bits, int first) {
  return (bits >> first & 15u) * 0x00204081u & 0x01010101u;
}

template <>
struct Code<Q5_0> : Of32<22, 5> {
  __device__ static Quarter read(const unsigned char* row, long long part, int quarter) {
    const unsigned char* block = row + part * kBytes;
    const unsigned bits = four_at(block + 2), digits = four_at(block + 6 + 4 * quarter);
    const float scale = half_at(block);
    return Of32::quarter((digits << 2 & 0x3c3c3c3cu) | fifths(bits, first(quarter)) << 6,
                         (digits >> 2 & 0x3c3c3c3cu) | fifths(bits, second(quarter)) << 6, scale, -16.0f * scale);
  }
};

template <>
struct Code<Q5_1> : Of32<24, 5> {
  __device__ static Quarter read(const unsigned char* row, long long part, int quarter) {
    const unsigned* words = reinterpret_cast<const unsigned*>(row + part * kBytes);
    const unsigned both = words[0], bits = words[1], digits = words[2 + quarter];
    return Of32::quarter((digits << 2 & 0x3c3c3c3cu) | fifths(bits, first(quarter)) << 6,
                         (digits >> 2 & 0x3c3c3c3cu) | fifths(bits, second(quarter)) << 6,
                         half_of(static_cast<unsigned short>(both)), half_of(static_cast<unsigned short>(both >> 16)));
  }
};

template <>
struct Code<Q8_0> {
  static constexpr long long kWeights = 32, kBytes = 34;
  static constexpr bool kHasMinimum = false;
  __device__ static int first(int quarter) { return 8 * quarter; }
  __device__ static int second(int quarter) { return 8 * quarter + 4; }

  __device__ static Quarter read(const unsigned char* row, long long part, int quarter) {
    const unsigned char* block = row + part * kBytes;
    const uint2 digits = eight_at(block + 2 + 8 * quarter);
    Quarter result;
    result.scale = half_at(block);
    result.minimum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // 2^23 + 128 + q: bytes with their sign turned around.
      const unsigned selector = 0x7440u | i;
      result.digits[i] = __uint_as_float(__byte_perm(digits.x ^ 0x80808080u, 0x4b000000u, selector)) - 8388736.0f;
      result.digits[4 + i] = __uint_as_float(__byte_perm(digits.y ^ 0x80808080u, 0x4b000000u, selector)) - 8388736.0f;
    }
    return result;
  }
  __device__ static float weight(float digit, const Quarter& quarter) { return digit * quarter.scale; }
  __device__ static float shift(const Quarter&) { return 0.0f; }
};

template <int kSize, int kBits>
struct Of256 : Shifted<kBits> {
  static constexpr long long kWeights = 256, kBytes = kSize;
  __device__ static int first(int quarter) { return 8 * quarter; }
  __device__ static int second(int quarter) { return 8 * quarter + 4; }
};

// The first 16 bytes of a block whose scales and minimums have 6 bits: the low bits of four scales, of four minimums,
// and of four of both, whose high bits are above those of the others.
struct Scales {
  float scale, minimum;
  __device__ Scales(const unsigned char* block, int part) {
    const uint4 head = *reinterpret_cast<const uint4*>(block);
    const int by = 8 * (part % 4);
    const unsigned low = head.y >> by, middle = head.z >> by, high = head.w >> by;
    const unsigned of_scale = part < 4 ? low & 63 : (high & 15) | (low >> 2 & 48);
    const unsigned of_minimum = part < 4 ? middle & 63 : (high >> 4 & 15) | (middle >> 2 & 48);
    scale = half_of(static_cast<unsigned short>(head.x)) * static_cast<float>(of_scale);
    minimum = half_of(static_cast<unsigned short>(head.x >> 16)) * -static_cast<float>(of_minimum);
  }
};

template <>
struct Code<Q4_K> : Of256<144, 4> {
  __device__ static Quarter read(const unsigned char* row, long long part, int quarter) {
    const unsigned char* block = row + part / 8 * kBytes;
    const int eighth = static_cast<int>(part % 8), by = 4 * (eighth % 2);
    const uint2 digits = *reinterpret_cast<const uint2*>(block + 16 + eighth / 2 * 32 + 8 * quarter);
    const Scales of(block, eighth);
    return Of256::quarter((digits.x >> by) << 3 & 0x78787878u, (digits.y >> by) << 3 & 0x78787878u, of.scale,
                          of.minimum);
  }
};

template <>
struct Code<Q5_K> : Of256<176, 5> {
  __device__ static Quarter read(const unsigned char* row, long long part, int quarter) {
    const unsigned char* block = row + part / 8 * kBytes;
    const int eighth = static_cast<int>(part % 8), by = 4 * (eighth % 2);
    const uint2 bits = *reinterpret_cast<const uint2*>(block + 16 + 8 * quarter);
    const uint2 digits = *reinterpret_cast<const uint2*>(block + 48 + eighth / 2 * 32 + 8 * quarter);
    const Scales of(block, eighth);
    return Of256::quarter(((digits.x >> by) << 2 & 0x3c3c3c3cu) | (bits.x >> eighth & 0x01010101u) << 6,
                          ((digits.y >> by) << 2 & 0x3c3c3c3cu) | (bits.y >> eighth & 0x01010101u) << 6, of.scale,
                          of.minimum);
  }
};

template <>
struct Code<Q6_K> : Of256<210, 6> {
  __device__ static Quarter read(const unsigned char* row, long long part, int quarter) {
    const unsigned char* block = row + part / 8 * kBytes;
    const int eighth = static_cast<int>(part % 8), half = eighth / 4, by = eighth / 2 % 2 * 4, of_high = eighth % 4 * 2;
    const uint2 digits = eight_at(block + half * 64 + eighth % 2 * 32 + 8 * quarter);
    const uint2 high = eight_at(block + 128 + half * 32 + 8 * quarter);
    const signed char of_16 = static_cast<signed char>(block[192 + 2 * eighth + quarter / 2]);
    const float scale = half_at(block + 208) * static_cast<float>(of_16);
    return Of256::quarter(((digits.x >> by) << 1 & 0x1e1e1e1eu) | ((high.x >> of_high) << 5 & 0x60606060u),
                          ((digits.y >> by) << 1 & 0x1e1e1e1eu) | ((high.y >> of_high) << 5 & 0x60606060u), scale,
                          -32.0f * scale);
  }
};

}  // namespace eqxcallback

#endif  // EQXCALLBACK_QUANTIZED_CODES_CUH
