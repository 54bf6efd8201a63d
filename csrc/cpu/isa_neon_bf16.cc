#include "cpu/simd/neon_bytes.h"
// After the vectors that they are made of.
#include "cpu/kernels/table.h"

namespace eqxcallback::cpu {

extern const Kernels kNeonBf16Kernels;
const Kernels kNeonBf16Kernels = kTable;

}  // namespace eqxcallback::cpu
