// Results that no cache would keep. A line that is stored whole to memory need not be read first, as it is on the way
// through the caches: a third of the traffic of a kernel that writes as much as it reads.
#pragma once

#include "cpu/kernels/common.h"

namespace eqxcallback::cpu {
namespace {

// What a call reads and writes, and the next one may find again: the last cache of the cores of one die.
inline constexpr int64_t kLastCacheBytes = int64_t{32} << 20;

// Whether the results, of rows of `size`, are to be streamed, where so many elements are read and written. Those of
// f32: half a line of 16 bits at a time gains nothing. Their vectors have to be where the instruction wants them.
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

// Calls fn with what stores vectors.
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
