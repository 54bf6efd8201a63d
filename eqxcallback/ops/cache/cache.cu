// Rows written into a cache, in place. Bytes are copied, so it is one kernel for all dtypes.
#include "../common.cuh"

namespace eqxcallback {

// Of one `Unit` for each thread. All sizes are in bytes.
template <typename Unit>
__device__ inline void append(const unsigned char* rows, const int* position, unsigned char* out, long long batch,
                              long long position_batch, long long length, long long count, long long row_bytes) {
  const long long units = count * row_bytes / static_cast<long long>(sizeof(Unit)), total = batch * units;
  const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += stride) {
    const long long b = divide(i, units);
    const long long wanted = position[b - divide(b, position_batch) * position_batch];
    const long long first = min(max(wanted, 0ll), length - count);
    Unit* const to = reinterpret_cast<Unit*>(out + (b * length + first) * row_bytes);
    to[i - b * units] = reinterpret_cast<const Unit*>(rows)[i];
  }
}

// cache, out [batch, length, row_bytes], which are the same memory; rows [batch, count, row_bytes], count <= length;
// position [position_batch], of which example b has b % position_batch, is clamped to 0 .. length - count.
//
// Block 256. Grid ceil(batch * count * row_bytes / unit / 256), where unit is the largest of 16, 4 and 1 that divides
// row_bytes; any grid is right. No shared bytes.
__global__ void __launch_bounds__(256)
    cache_append(const unsigned char* cache, const unsigned char* rows, const int* position, unsigned char* out,
                 long long batch, long long position_batch, long long length, long long count, long long row_bytes) {
  const auto all = reinterpret_cast<unsigned long long>(rows) | reinterpret_cast<unsigned long long>(out) |
                   static_cast<unsigned long long>(row_bytes);
  if (all % 16 == 0) {
    append<uint4>(rows, position, out, batch, position_batch, length, count, row_bytes);
  } else if (all % 4 == 0) {
    append<unsigned>(rows, position, out, batch, position_batch, length, count, row_bytes);
  } else {
    append<unsigned char>(rows, position, out, batch, position_batch, length, count, row_bytes);
  }
}

}  // namespace eqxcallback
