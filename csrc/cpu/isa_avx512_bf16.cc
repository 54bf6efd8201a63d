// The table of kernels for AVX-512 with products of bf16.
#include "cpu/simd/avx512_bytes.h"
// The kernels come after the vectors that they use.
#include "cpu/kernels/table.h"

namespace eqxcallback::cpu {

extern const Kernels kAvx512Bf16Kernels;
const Kernels kAvx512Bf16Kernels = kTable;

}  // namespace eqxcallback::cpu
