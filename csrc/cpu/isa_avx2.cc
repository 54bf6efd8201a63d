#include "cpu/simd/avx2.h"
// After the vectors that they are made of.
#include "cpu/kernels/table.h"

namespace eqxcallback::cpu {

extern const Kernels kAvx2Kernels;
const Kernels kAvx2Kernels = kTable;

}  // namespace eqxcallback::cpu
