#include "cpu/simd/neon_bytes.h"
// After the vectors that they are made of.
#include "cpu/kernels/table.h"

namespace eqxcallback::cpu {

extern const Kernels kNeonDotKernels;
const Kernels kNeonDotKernels = kTable;

}  // namespace eqxcallback::cpu
