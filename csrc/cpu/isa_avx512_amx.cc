// The table of kernels for AVX-512 with tiles of bf16.
#ifdef EQXCALLBACK_EMULATED_TILES  // by a test, on a processor without AMX
#define EQXCALLBACK_TILES
#else
#include "cpu/simd/amx.h"
#endif
#include "cpu/simd/avx512_bytes.h"
// The kernels come after the vectors that they use.
#include "cpu/kernels/table.h"

namespace eqxcallback::cpu {

extern const Kernels kAvx512AmxKernels;
const Kernels kAvx512AmxKernels = kTable;

}  // namespace eqxcallback::cpu
