// The table of kernels for any CPU.
#include "cpu/simd/portable.h"
// The kernels come after the vectors that they use.
#include "cpu/kernels/table.h"

namespace eqxcallback::cpu {

extern const Kernels kPortableKernels;
const Kernels kPortableKernels = kTable;

}  // namespace eqxcallback::cpu
