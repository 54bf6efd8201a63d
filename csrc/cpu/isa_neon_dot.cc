// The table of kernels for NEON with dot products of bytes.
#include "cpu/simd/neon_bytes.h"
// The kernels come after the vectors that they use.
#include "cpu/kernels/table.h"

namespace eqxcallback::cpu {

extern const Kernels kNeonDotKernels;
const Kernels kNeonDotKernels = kTable;

}  // namespace eqxcallback::cpu
