// Streaming stores, for results that no cache would keep. A line that is stored whole to memory need not be read first;
// on the way through the caches it is, which is a third of the traffic of a kernel that writes as much as it reads.
#pragma once

#include "cpu/kernels/common.h"

namespace eqxcallback::cpu {
namespace {

// The bytes that the next call may still have in cache: the last cache of the cores of one die.
inline constexpr int64_t kLastCacheBytes = int64_t{32} << 20;

// True if the results, of rows of `size` elements, should be streamed, in a call that reads and writes so many
// elements. Only results in f32: half a line of 16-bit numbers at a time gains nothing. Vectors have to be aligned.
template <class T, class... Results>
bool exceeds_caches(int64_t elements, int64_t size, const Results*... results) {
  constexpr uintptr_t kBytes = kLanes * sizeof(float);
  const bool aligned = size % kLanes == 0 && ((reinterpret_cast<uintptr_t>(results) % kBytes == 0) && ...);
  return std::is_same_v<T, float> && aligned && elements * static_cast<int64_t>(sizeof(T)) > kLastCacheBytes;
}

struct Store {
  template <class T, class Count>
  void operator()(T* p, F x, Count count) const {
    store(p, x, count);
  }
};
struct Stream {
  void operator()(float* p, F x, Full) const { Simd::stream(p, x); }
  void operator()(float* p, F x, int count) const { store(p, x, count); }
};

// Calls fn with the function that stores vectors.
template <class T, class Fn>
[[gnu::always_inline]] inline void with_stores(bool streams, const Fn& fn) {
  if constexpr (std::is_same_v<T, float>) {
    if (streams) {
      fn(Stream{});
      Simd::end_streams();
      return;
    }
  }
  fn(Store{});
}

}  // namespace
}  // namespace eqxcallback::cpu
