// The table of kernels for AVX-512.
#include "cpu/simd/avx512_bytes.h"
// The kernels come after the vectors that they use.
#include "cpu/kernels/table.h"

namespace eqxcallback::cpu {

extern const Kernels kAvx512Kernels;
const Kernels kAvx512Kernels = kTable;

}  // namespace eqxcallback::cpu
