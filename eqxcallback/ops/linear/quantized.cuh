// What kernels over GGUF blocks share: which encodings there are, and how their scales are read.
#ifndef EQXCALLBACK_QUANTIZED_CUH
#define EQXCALLBACK_QUANTIZED_CUH

#include "../common.cuh"

namespace eqxcallback {

enum Encoding { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };

__device__ inline float half_of(unsigned short bits) {
  __half_raw raw;
  raw.x = bits;
  return __half2float(__half(raw));
}

__device__ inline float half_at(const unsigned char* from) {
  return half_of(*reinterpret_cast<const unsigned short*>(from));
}

}  // namespace eqxcallback

#endif  // EQXCALLBACK_QUANTIZED_CUH
