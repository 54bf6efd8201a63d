#include "cpu/simd/neon.h"
// After the vectors that they are made of.
#include "cpu/kernels/table.h"

namespace eqxcallback::cpu {

extern const Kernels kNeonKernels;
const Kernels kNeonKernels = kTable;

}  // namespace eqxcallback::cpu
