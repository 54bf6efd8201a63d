// The table of kernels for NEON with products of bf16.
#include "cpu/simd/neon_bytes.h"
// The kernels come after the vectors that they use.
#include "cpu/kernels/table.h"

namespace eqxcallback::cpu {

extern const Kernels kNeonBf16Kernels;
const Kernels kNeonBf16Kernels = kTable;

}  // namespace eqxcallback::cpu
