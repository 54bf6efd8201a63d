// The table of kernels for AVX2, FMA and F16C.
#include "cpu/simd/avx2.h"
// The kernels come after the vectors that they use.
#include "cpu/kernels/table.h"

namespace eqxcallback::cpu {

extern const Kernels kAvx2Kernels;
const Kernels kAvx2Kernels = kTable;

}  // namespace eqxcallback::cpu
