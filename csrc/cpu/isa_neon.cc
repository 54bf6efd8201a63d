// The table of kernels for NEON.
#include "cpu/simd/neon.h"
// The kernels come after the vectors that they use.
#include "cpu/kernels/table.h"

namespace eqxcallback::cpu {

extern const Kernels kNeonKernels;
const Kernels kNeonKernels = kTable;

}  // namespace eqxcallback::cpu
