// Functions that AVX2 and AVX-512 share.
#pragma once

#include <immintrin.h>

#include "cpu/simd/exp2.h"
#include "cpu/types.h"

namespace eqxcallback::cpu {
namespace {

// Scales and minimums, which GGUF blocks have in halves.
struct Halves {
  static float half(const uint8_t* p) {
    uint16_t bits;
    std::memcpy(&bits, p, sizeof(bits));
    return _cvtsh_ss(bits);
  }

  using Minimums = __m128;
  static Minimums no_minimums() { return _mm_setzero_ps(); }
  // Returns the scale in the lowest lane.
  static __m128 add_minimum(const uint8_t* p, const float* factor, Minimums& minimums) {
    int32_t bits;
    std::memcpy(&bits, p, sizeof(bits));
    const __m128 both = _mm_cvtph_ps(_mm_cvtsi32_si128(bits));
    const __m128 pair = _mm_castsi128_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(factor)));
    minimums = _mm_fmadd_ps(both, pair, minimums);
    return both;
  }
  static float total(Minimums minimums) { return minimums[1]; }
};

}  // namespace
}  // namespace eqxcallback::cpu
