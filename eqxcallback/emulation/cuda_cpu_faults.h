// A kernel that touches memory which is not there, as by a null pointer, or a vector where a GPU reads none: an error
// of its launch, not the end of the process. What lies next to an array is there, and is not found here.
#pragma once

#include <csignal>
#include <cstdio>
#include <mutex>

#include "cuda_cpu_fibers.h"

namespace cuda_cpu {

// Within its scope faults of kernels are errors. Others go to who was asked before: the debugger of Python, say.
class FaultGuard {
 public:
  FaultGuard() {
    const std::lock_guard<std::mutex> lock(mutex);
    if (count++ > 0) return;
    struct sigaction own = {};
    own.sa_sigaction = handle;
    own.sa_flags = SA_SIGINFO | SA_NODEFER;  // it does not return where the kernel is at fault
    for (unsigned i = 0; i < kSignals; ++i) sigaction(signals[i], &own, &before[i]);
  }
  ~FaultGuard() {
    const std::lock_guard<std::mutex> lock(mutex);
    if (--count > 0) return;
    for (unsigned i = 0; i < kSignals; ++i) sigaction(signals[i], &before[i], nullptr);
  }
  FaultGuard(const FaultGuard&) = delete;
  FaultGuard& operator=(const FaultGuard&) = delete;

 private:
  static constexpr unsigned kSignals = 4;
  static constexpr int signals[kSignals] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
  static inline std::mutex mutex;
  static inline int count = 0;
  static inline struct sigaction before[kSignals] = {};
  static inline thread_local bool is_passing_on = false;

  // x86 does not say which address it was where none can be, as in the middle of all that 64 bits count. It is zero
  // then.
  static bool is_without_address(const siginfo_t* info) {
#ifdef SI_KERNEL
    return info->si_code == SI_KERNEL;
#else
    (void)info;
    return false;
#endif
  }

  static void handle(int signal, siginfo_t* info, void* context) {
    if (current != nullptr && current->fiber != nullptr) {
      const uint3 thread = current->fiber->index, block = current->index;
      char text[200];
      const int length = std::snprintf(text, sizeof(text), "thread (%u, %u, %u) of block (%u, %u, %u) ", thread.x,
                                       thread.y, thread.z, block.x, block.y, block.z);
      const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
      char* const rest = text + length;
      const size_t size = sizeof(text) - static_cast<size_t>(length);
      if (signal == SIGFPE) {
        std::snprintf(rest, size, "divides an integer by zero");
      } else if (signal == SIGILL) {  // what the compiler was asked to put where addresses are wrong
        std::snprintf(rest, size, "reads or writes at an address that is not a multiple of the alignment of its type");
      } else if (is_without_address(info)) {
        std::snprintf(rest, size, "reads or writes far from all memory");
      } else if (address < 1 << 16) {
        std::snprintf(rest, size,
                      "reads or writes by a null pointer: what is absent, or a gradient that is not needed");
      } else {
        std::snprintf(rest, size, "reads or writes at %p, where there is no memory", info->si_addr);
      }
      fail(text);
    }
    if (is_passing_on) {
      std::signal(signal, SIG_DFL);
      return;
    }
    is_passing_on = true;
    for (unsigned i = 0; i < kSignals; ++i) {
      if (signals[i] != signal) continue;
      if (before[i].sa_flags & SA_SIGINFO) {
        before[i].sa_sigaction(signal, info, context);
      } else if (before[i].sa_handler != SIG_DFL && before[i].sa_handler != SIG_IGN) {
        before[i].sa_handler(signal);
      } else {
        std::signal(signal, SIG_DFL);  // the same again, and the end
      }
    }
    is_passing_on = false;
  }
};

}  // namespace cuda_cpu
