// The types of CUDA: its own headers, or, where they are not installed, the vectors alone.
#pragma once

#if __has_include(<cuda_fp16.h>)
#include <cuda_bf16.h>  // and with it the vector types
#include <cuda_fp16.h>
#else

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }

// Vectors of two and four are aligned to their size, up to 16 bytes.
#define CUDA_CPU_VECTORS(T, name)                                                    \
  struct name##1 { T x; };                                                           \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                 \
  struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) name##4 { T x, y, z, w; }; \
  inline name##1 make_##name##1(T x) { return {x}; }                                 \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                         \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
#define CUDA_CPU_THREE(T, name)  \
  struct name##3 { T x, y, z; }; \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }

CUDA_CPU_VECTORS(signed char, char)
CUDA_CPU_VECTORS(unsigned char, uchar)
CUDA_CPU_VECTORS(short, short)
CUDA_CPU_VECTORS(unsigned short, ushort)
CUDA_CPU_VECTORS(int, int)
CUDA_CPU_VECTORS(unsigned, uint)
CUDA_CPU_VECTORS(long long, longlong)
CUDA_CPU_VECTORS(unsigned long long, ulonglong)
CUDA_CPU_VECTORS(float, float)
CUDA_CPU_VECTORS(double, double)
CUDA_CPU_THREE(signed char, char)
CUDA_CPU_THREE(unsigned char, uchar)
CUDA_CPU_THREE(short, short)
CUDA_CPU_THREE(unsigned short, ushort)
CUDA_CPU_THREE(int, int)
CUDA_CPU_THREE(long long, longlong)
CUDA_CPU_THREE(unsigned long long, ulonglong)
CUDA_CPU_THREE(float, float)
CUDA_CPU_THREE(double, double)
#undef CUDA_CPU_VECTORS
#undef CUDA_CPU_THREE

#endif
