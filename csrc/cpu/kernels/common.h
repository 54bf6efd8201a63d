// Tools that the kernels of one instruction set share. The files of this folder are compiled once for each instruction
// set, after its `Simd`, and all that they define has internal linkage.
#pragma once

#include <cstdlib>
#include <type_traits>

#include "cpu/kernels.h"

namespace eqxcallback::cpu {
namespace {

using F = Simd::F;
inline constexpr int kLanes = Simd::kLanes;
inline constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.693147180559945309f;
// The lowest number, in place of a -inf that would be subtracted from -inf.
inline constexpr float kLowest = -0x1.fffffep127f;

// True if there are 32 registers and not 16, by the sums of an outer product.
inline constexpr bool kManyRegisters = Simd::kOuterRows * Simd::kOuterVectors >= 16;

// True if the processor multiplies T without widening, two neighbours at a time, into sums of f32.
#ifdef EQXCALLBACK_PAIRS
template <class T>
inline constexpr bool kHasPairs = std::is_same_v<T, Bf16>;
#else
template <class>
inline constexpr bool kHasPairs = false;
#endif

// True if the processor multiplies tiles of T.
#ifdef EQXCALLBACK_TILES
template <class T>
inline constexpr bool kHasTiles = std::is_same_v<T, Bf16>;
#else
template <class>
inline constexpr bool kHasTiles = false;
#endif

// All lanes, as a count that is known when compiling.
struct Full {};
template <class T>
F load(const T* p, Full) {
  return Simd::load(p);
}
template <class T>
F load(const T* p, int n) {
  return Simd::load(p, n);
}
// Loads integers without their scale.
F load(const int8_t* p, Full) { return Simd::int8s(reinterpret_cast<const uint8_t*>(p)); }
F load(const int8_t* p, int n) {
  uint8_t bytes[kLanes] = {};
  std::memcpy(bytes, p, static_cast<size_t>(n));
  return Simd::int8s(bytes);
}
template <class T>
void store(T* p, F x, Full) {
  Simd::store(p, x);
}
template <class T>
void store(T* p, F x, int n) {
  Simd::store(p, x, n);
}

// Calls body(i, count) for the vectors of n elements: `Full` ones, and a last one of fewer. Inlined: otherwise
// what a body refers to would be read again after each store, which may be to any type.
template <int kStep = kLanes, class Body>
[[gnu::always_inline]] inline void for_vectors(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) body(i, Full{});
  if (i < n) body(i, static_cast<int>(n - i));
}

// Keeps the lanes that count, and puts `other` into those that do not.
F first_or(F x, Full, float) { return x; }
F first_or(F x, int n, float other) { return Simd::first_or(x, n, other); }

// step(acc, i, count) over the vectors of n elements, in four chains, which are joined in the end: a single chain waits
// for itself.
template <class Acc, class Step, class Join>
[[gnu::always_inline]] inline Acc fold(int64_t n, Acc start, const Step& step, const Join& join) {
  Acc acc[4] = {start, start, start, start};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) acc[c] = step(acc[c], i + c * kLanes, Full{});
  }
  for (; i + kLanes <= n; i += kLanes) acc[0] = step(acc[0], i, Full{});
  if (i < n) acc[0] = step(acc[0], i, static_cast<int>(n - i));
  return join(join(acc[0], acc[1]), join(acc[2], acc[3]));
}
template <class Step>
[[gnu::always_inline]] inline float sum_of(int64_t n, const Step& step) {
  return Simd::sum(fold(n, Simd::zero(), step, Simd::add));
}

// Two sums in one pass. The step's accumulator, and what it returns, is a pair of vectors.
struct VectorPair {
  F first, second;
};
struct SumPair {
  float first, second;
};
template <class Step>
[[gnu::always_inline]] inline SumPair sums_of(int64_t n, const Step& step) {
  const VectorPair sums = fold(n, VectorPair{Simd::zero(), Simd::zero()}, step, [](VectorPair a, VectorPair b) {
    return VectorPair{Simd::add(a.first, b.first), Simd::add(a.second, b.second)};
  });
  return {Simd::sum(sums.first), Simd::sum(sums.second)};
}

// Calls fn with a null pointer of the element's type.
template <class Fn>
void with_type(Element element, const Fn& fn) {
  if (element == Element::kF32) {
    fn(static_cast<float*>(nullptr));
  } else if (element == Element::kBf16) {
    fn(static_cast<Bf16*>(nullptr));
  } else {
    fn(static_cast<F16*>(nullptr));
  }
}
template <class P>
using Pointee = std::remove_pointer_t<P>;

// Like std::integral_constant, but with internal linkage: see types.h.
template <int n>
struct Int {
  static constexpr int value = n;
};

// Prefetches memory into a cache: 3 is the first one, 2 the second. It may lie past the end of its array: a prefetch is
// a hint, and touches nothing. Always inlined, as whatever else calls it: to GCC a function that only prefetches has no
// effect, and a call of it is dropped.
template <int kLocality = 2, class T>
[[gnu::always_inline]] inline void prefetch(const T* p, int64_t n) {
  const auto* bytes = reinterpret_cast<const char*>(p);
  for (int64_t i = 0; i < n * static_cast<int64_t>(sizeof(T)); i += 64) __builtin_prefetch(bytes + i, 0, kLocality);
}

// False where no processor is known that prefers its first cache and takes this table: it has one for AVX-512 without
// tiles. Others need no second copy of the kernels.
#ifdef EQXCALLBACK_TILES
inline constexpr bool kMayPreferFirstCache = false;
#else
inline constexpr bool kMayPreferFirstCache = kManyRegisters;
#endif
bool prefers_first_cache(const Prefetching& prefetching) {
  return kMayPreferFirstCache && prefetching.into_first_cache;
}

// Calls body(Int<cache>{}) with the cache for what is read once, such as weights. In short loops, to choose for each
// prefetch takes time.
template <class Body>
[[gnu::always_inline]] inline void with_locality(const Prefetching& prefetching, const Body& body) {
  if constexpr (kMayPreferFirstCache) {
    if (prefetching.into_first_cache) return body(Int<3>{});
  }
  body(Int<2>{});
}
template <class T>
[[gnu::always_inline]] inline void prefetch(const T* p, int64_t n, const Prefetching& prefetching) {
  prefers_first_cache(prefetching) ? prefetch<3>(p, n) : prefetch<2>(p, n);
}

// So many bytes before they are read, streams are prefetched.
inline constexpr int64_t kStreamAhead = 4096;

// Prefetches weights that are read in several streams: the processor by itself sees too little of what is coming.
template <class T>
[[gnu::always_inline]] inline void prefetch_stream(const T* p, const Prefetching& prefetching) {
  prefetch(reinterpret_cast<const char*>(p) + kStreamAhead, 1, prefetching);
}

// Prefetches n numbers of a stream that is read alone, as many bytes ahead, where that pays: some processors see what
// is coming up to the end of a page, and when there is something to compute with each number, that is too little.
template <class T>
[[gnu::always_inline]] inline void prefetch_one_stream(const T* p, int64_t n, const Prefetching& prefetching) {
  if (prefetching.of_one_stream)
    prefetch(reinterpret_cast<const char*>(p) + kStreamAhead, n * int64_t{sizeof(T)}, prefetching);
}

// The lanes of as many vectors as have room for n numbers.
template <int n>
inline constexpr int kWhole = (n + kLanes - 1) / kLanes * kLanes;

// Memory for the length of one call.
class Scratch {
 public:
  explicit Scratch(int64_t floats)
      : data_(static_cast<float*>(std::aligned_alloc(64, (static_cast<size_t>(floats) / 16 + 1) * 64))) {
    if (data_ == nullptr) throw_bad_alloc();
  }
  ~Scratch() { std::free(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  float* data() const { return data_; }

 private:
  float* data_;
};

}  // namespace
}  // namespace eqxcallback::cpu
