// A kernel that touches memory which is not there, as by a null pointer, or a vector where a GPU reads none: an error
// of its launch, not the end of the process. What lies next to an array is there, and is not found here.
#pragma once

#include <csignal>
#include <cstdio>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_cpu_fibers.h"

namespace cuda_cpu {

// Within its scope faults of kernels are errors. Others go to who was asked before: the debugger of Python, say.
class FaultGuard {
 public:
  FaultGuard() : room(64 << 10) {
    stack_t stack = {};
    stack.ss_sp = room.data();
    stack.ss_size = room.size();
    sigaltstack(&stack, &stack_before);  // that of the kernel may be what has no room
    const std::lock_guard<std::mutex> lock(mutex);
    if (count++ > 0) return;
    struct sigaction own = {};
    own.sa_sigaction = handle;
    own.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;  // it does not return where the kernel is at fault
    for (unsigned i = 0; i < kSignals; ++i) sigaction(signals[i], &own, &before[i]);
  }
  ~FaultGuard() {
    sigaltstack(&stack_before, nullptr);
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
  std::vector<char> room;  // for handlers
  stack_t stack_before = {};

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

  static std::string what(int signal, const siginfo_t* info) {
    const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
    if (signal == SIGFPE) return "divides an integer by zero";
    if (signal == SIGILL) {  // what the compiler was asked to put where addresses are wrong
      return "reads or writes at an address that is not a multiple of the alignment of its type";
    }
    if (is_without_address(info)) return "reads or writes far from all memory";
    if (address < 1 << 16) return "reads or writes by a null pointer: what is absent, or a gradient that is not needed";
    if (address - reinterpret_cast<uintptr_t>(current->fiber->stack) < kGuardBytes) {
      return "has more than 256 KiB of arrays and calls of its own, the room that it has in the emulator";
    }
    char text[80];
    std::snprintf(text, sizeof(text), "reads or writes at %p, where there is no memory", info->si_addr);
    return text;
  }

  static void handle(int signal, siginfo_t* info, void* context) {
    if (current != nullptr && current->fiber != nullptr) {
      fail(who() + what(signal, info));
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
