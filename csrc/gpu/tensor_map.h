// TensorMap: how the tensor memory accelerator sees an array, of which it copies a box to shared memory at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "gpu/driver.h"

namespace eqxcallback::gpu {

// cuTensorMapEncodeTiled of the driver's stable ABI.
using TensorMapEncodeTiled = int (*)(void* map, int type, unsigned rank, void* address, const uint64_t* dims,
                                     const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                                     int interleave, int swizzle, int promotion, int fill);

// The arguments of cuTensorMapEncodeTiled, but for the address, which is known when a kernel runs. Innermost dimensions
// come first.
struct TensorMap {
  static constexpr size_t kRank = 5;
  static constexpr size_t kWords = 16;  // the words of the encoded map, which is passed by value
  static constexpr size_t kNumbers = 8 + 4 * kRank - 1;

  // Makes a map of `kNumbers` numbers, in the order of the fields.
  static TensorMap of(const int64_t* numbers);
  bool fits(size_t words) const { return words >= kWords && word <= words - kWords && rank <= kRank; }

  // Writes the map of the array at `address` to `words`: zeros for a null pointer, and for an array without dimensions.
  void encode(const Driver& driver, TensorMapEncodeTiled function, void* address, uint64_t* words) const;

  size_t word;     // the map's first word among the words of a call
  size_t pointer;  // the array's position among the pointers
  int type;
  unsigned rank;
  int interleave, swizzle, promotion, fill;
  std::array<uint64_t, kRank> dims;
  std::array<uint64_t, kRank - 1> strides;  // in bytes
  std::array<uint32_t, kRank> box, element_strides;
};

}  // namespace eqxcallback::gpu
