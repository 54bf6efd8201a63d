#include "cpu/simd/avx512_bytes.h"
// After the vectors that they are made of.
#include "cpu/kernels/table.h"

namespace eqxcallback::cpu {

extern const Kernels kAvx512Bf16Kernels;
const Kernels kAvx512Bf16Kernels = kTable;

}  // namespace eqxcallback::cpu
