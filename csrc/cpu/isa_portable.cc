#include "cpu/simd/portable.h"
// After the vectors that they are made of.
#include "cpu/kernels/table.h"

namespace eqxcallback::cpu {

extern const Kernels kPortableKernels;
const Kernels kPortableKernels = kTable;

}  // namespace eqxcallback::cpu
