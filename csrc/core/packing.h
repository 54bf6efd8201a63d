// Packing of elements of less than a byte: XLA packs them, the first one in the low bits; NumPy wants one byte each.
#pragma once

#include <cstddef>
#include <cstdint>

namespace eqxcallback {

// `elements[count]` <- `packed[ceil(count * bits / 8)]`, for bits in {1, 2, 4}.
inline void unpack(const uint8_t* packed, size_t count, unsigned bits, uint8_t* elements) {
  const size_t per_byte = 8 / bits;
  const unsigned mask = (1u << bits) - 1u;
  for (size_t i = 0; i < count; ++i) {
    const unsigned shift = static_cast<unsigned>(i % per_byte) * bits;
    elements[i] = static_cast<uint8_t>((packed[i / per_byte] >> shift) & mask);
  }
}

// The inverse of `unpack`. Unused high bits of the last byte become zero; no byte after it is touched.
inline void pack(const uint8_t* elements, size_t count, unsigned bits, uint8_t* packed) {
  const size_t per_byte = 8 / bits;
  const unsigned mask = (1u << bits) - 1u;
  for (size_t i = 0; i < count;) {
    unsigned byte = 0;
    const size_t target = i / per_byte;
    for (size_t k = 0; k < per_byte && i < count; ++k, ++i) {
      byte |= (elements[i] & mask) << (static_cast<unsigned>(k) * bits);
    }
    packed[target] = static_cast<uint8_t>(byte);
  }
}

}  // namespace eqxcallback
