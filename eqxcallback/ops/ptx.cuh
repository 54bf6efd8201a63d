// What only PTX has, for devices from 8.0 on: products of tensor cores, their loads from shared memory, and copies to
// it that nobody waits for. On a CPU these are functions of the emulator, of the same meaning.
#ifndef EQXCALLBACK_PTX_CUH
#define EQXCALLBACK_PTX_CUH

#include "common.cuh"

namespace eqxcallback {

#ifdef __CUDACC__

// sums += a @ b, of 16 rows, 8 columns, and 16 elements of T that are multiplied.
__device__ inline void mma(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2], __nv_bfloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ inline void mma(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2], __half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// word & mask | bits, in one instruction: the compiler, which sees that both are constants, makes two.
__device__ inline unsigned and_or(unsigned word, unsigned mask, unsigned bits) {
  unsigned result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "r"(mask), "r"(bits));
  return result;
}

__device__ inline unsigned shared_address(const void* address) {
  return static_cast<unsigned>(__cvta_generic_to_shared(address));
}

// Four matrices of 8 rows of 16 bytes in shared memory. Lane 8 i + r says where row r of matrix i is. A lane gets of
// each the 4 bytes `lane % 4` of row lane / 4; if transposed, elements of 16 bits: those of column lane / 4 in the rows
// 2 (lane % 4) and the next.
template <bool kTransposed>
__device__ inline void load_matrices(unsigned (&words)[4], const void* row) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(shared_address(row))
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(shared_address(row))
                 : "memory");
  }
}

// Begins to copy kBytes, 16, 8 or 4, from global to shared memory, of which the first `read` are read, and the others
// 0. The copies between two end_group() of a thread are a group, which may be empty.
template <int kBytes>
__device__ inline void begin_copy_of(void* to, const void* from, unsigned read) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(read)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from), "n"(kBytes),
                 "r"(read)
                 : "memory");
  }
}
__device__ inline void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all groups of this thread but the last kLeft have arrived. Others see them behind a barrier.
template <int kLeft>
__device__ inline void wait_for_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// Of a launch that may begin before the one ahead of it on the stream has ended: until that has, and what it has
// written is seen. In any other launch, and before 9.0, where there are none, it is nothing.
__device__ inline void wait_for_launch_ahead() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Such a launch may begin when all blocks of the one ahead of it have said so, or have ended.
__device__ inline void let_next_launch_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#else

inline unsigned and_or(unsigned word, unsigned mask, unsigned bits) { return (word & mask) | bits; }
// Launches follow each other.
inline void wait_for_launch_ahead() {}
inline void let_next_launch_begin() {}
template <typename T>
void mma(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2], T type) {
  cuda_cpu_mma_m16n8k16(sums, a, b, type);
}
template <bool kTransposed>
void load_matrices(unsigned (&words)[4], const void* row) {
  cuda_cpu_ldmatrix_x4(words, row, kTransposed);
}
template <int kBytes>
void begin_copy_of(void* to, const void* from, unsigned read) {
  cuda_cpu_cp_async(to, from, kBytes, read);
}
inline void end_group() { cuda_cpu_cp_async_commit_group(); }
template <int kLeft>
void wait_for_groups() {
  cuda_cpu_cp_async_wait_group(kLeft);
}

#endif

// The same of all of them, or if not `is_there` of none.
template <int kBytes>
__device__ inline void begin_copy(void* to, const void* from, bool is_there) {
  begin_copy_of<kBytes>(to, from, is_there ? kBytes : 0);
}

}  // namespace eqxcallback

#endif  // EQXCALLBACK_PTX_CUH
