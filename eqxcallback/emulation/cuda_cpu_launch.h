// Launches on a CPU: the memory that blocks share, and grids.
#pragma once

#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <random>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "cuda_cpu_faults.h"

namespace cuda_cpu {

// -- memory

// Static shared memory is this library's thread-local storage, which the loader knows as a whole.
struct StaticShared {
  char* begin = nullptr;
  size_t bytes = 0;

  StaticShared() {
    current = nullptr;  // a thread's storage is made by its first use
    dl_iterate_phdr(&find, this);
  }
  static int find(dl_phdr_info* info, size_t, void* self) {
    const auto here = reinterpret_cast<uintptr_t>(&find);
    bool ours = false;
    size_t bytes = 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const auto& part = info->dlpi_phdr[i];
      const uintptr_t start = info->dlpi_addr + part.p_vaddr;
      ours |= part.p_type == PT_LOAD && start <= here && here < start + part.p_memsz;
      if (part.p_type == PT_TLS) bytes = part.p_memsz;
    }
    if (ours) *static_cast<StaticShared*>(self) = StaticShared{static_cast<char*>(info->dlpi_tls_data), bytes};
    return ours;
  }
  void poison(Block* block) {
    const OwnStack stack = own_stack;
    if (begin != nullptr) std::memset(begin, 0xff, bytes);
    own_stack = stack;
    current = block;
  }

 private:
  StaticShared(char* begin, size_t bytes) : begin(begin), bytes(bytes) {}
};

struct Stacks {
  static constexpr int kInstallGuard = 102;  // MADV_GUARD_INSTALL, which headers may not have yet
#ifdef __x86_64__
  static constexpr size_t kTouchedBytes = 4096;  // g++ touches each page of a frame, see _FLAGS
#else
  static constexpr size_t kTouchedBytes = kGuardBytes;
#endif
  size_t count;
  char* data;

  explicit Stacks(size_t count) : count(count) {
    constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* memory = mmap(nullptr, count * kStackBytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    data = static_cast<char*>(memory);
    for (size_t i = 0; i < count; ++i) {
      char* const guard = data + i * kStackBytes;
      // Linux has the first since 6.13. The mapping stays in one piece, which makes a launch of one block twice as
      // fast.
      if (madvise(guard + kGuardBytes - kTouchedBytes, kTouchedBytes, kInstallGuard) != 0) {
        mprotect(guard, kGuardBytes, PROT_NONE);
      }
    }
  }
  ~Stacks() { munmap(data, count * kStackBytes); }
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;
};

// -- launches

inline void run_grid(const std::function<void()>& kernel, const unsigned grid[3], const unsigned size[3],
                     unsigned shared_bytes, unsigned seed) {
  const uint64_t threads = uint64_t{size[0]} * size[1] * size[2];
  if (threads == 0 || threads > 1024 || size[2] > 64) throw std::runtime_error("a block has 1 to 1024 threads");
  if (grid[0] == 0 || grid[0] > INT_MAX || grid[1] == 0 || grid[1] > 65535 || grid[2] == 0 || grid[2] > 65535) {
    throw std::runtime_error("a grid has 1 to 2^31 - 1 blocks along x, and to 65535 along y and z");
  }
  StaticShared shared;
  Block block;
  block.size = dim3(size[0], size[1], size[2]);
  block.grid = dim3(grid[0], grid[1], grid[2]);
  block.kernel = &kernel;
  block.copies_arrive_early = seed % 2 == 0;
  const Stacks stacks(threads);
  block.fibers.resize(threads);
  for (size_t i = 0; i < threads; ++i) block.fibers[i].stack = stacks.data + i * kStackBytes;
  // No more than was asked for, so that AddressSanitizer sees what lies beyond.
  if (posix_memalign(&block.dynamic, 128, std::max(shared_bytes, 1u)) != 0) throw std::bad_alloc();
  const std::unique_ptr<void, void (*)(void*)> owner(block.dynamic, &std::free);
  std::mt19937 random(seed);
#ifndef __SANITIZE_ADDRESS__  // which has more to say
  const FaultGuard guard;
#endif
  for (unsigned z = 0; z < grid[2]; ++z) {
    for (unsigned y = 0; y < grid[1]; ++y) {
      for (unsigned x = 0; x < grid[0]; ++x) {
        block.index = {x, y, z};
        shared.poison(&block);
        std::memset(block.dynamic, 0xff, shared_bytes);
        for (const DynamicName::Set set : DynamicName::all) set(block.dynamic);
        run(block, seed == 0 ? nullptr : &random);
      }
    }
  }
  current = nullptr;
}

template <class... P, size_t... I>
void launch_with(void (*kernel)(P...), void** params, std::index_sequence<I...>, const unsigned grid[3],
                 const unsigned block[3], unsigned shared_bytes, unsigned seed) {
  run_grid([&] { kernel(*static_cast<std::decay_t<P>*>(params[I])...); }, grid, block, shared_bytes, seed);
}

// As cuLaunchKernel takes them: `params` has a pointer to the value of each parameter. Returns 0, or 1 and a text.
template <class... P>
int launch(void (*kernel)(P...), void** params, const unsigned grid[3], const unsigned block[3], unsigned shared_bytes,
           unsigned seed, char* error, size_t error_size) {
  try {
    launch_with(kernel, params, std::index_sequence_for<P...>(), grid, block, shared_bytes, seed);
    return 0;
  } catch (const std::exception& raised) {
    if (error_size > 0) {
      std::strncpy(error, raised.what(), error_size - 1);
      error[error_size - 1] = '\0';
    }
    return 1;
  }
}

}  // namespace cuda_cpu
