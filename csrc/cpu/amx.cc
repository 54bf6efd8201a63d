#include "cpu/amx.h"

#if defined(__x86_64__) && defined(__linux__) && !defined(EQXCALLBACK_EMULATED_TILES)
#include <cpuid.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "cpu/simd/amx.h"

namespace eqxcallback::cpu {
namespace {

bool announces_amx() {
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kBf16) != 0 && (edx & kTiles) != 0;
}

// Linux gives a process the memory for tiles when it asks, from 5.16 on.
bool is_allowed() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

// A copy of this process tries, without the handlers of `fork`, and without a signal to its parent, who may wait for
// children of its own.
bool works_in_child() {
  const long child = syscall(SYS_clone, 0, nullptr, nullptr, nullptr, nullptr);
  if (child == 0) {
    prctl(PR_SET_DUMPABLE, 0);  // no file of its memory
    {
      const Tiles tiles;
      Tiles::zero<0>(), Tiles::zero<1>(), Tiles::zero<2>();
      Tiles::dot<0, 1, 2>();
    }
    syscall(SYS_exit_group, 0);
  }
  if (child < 0) return false;
  int status = 1;
  while (waitpid(static_cast<pid_t>(child), &status, __WALL) < 0) {
    if (errno != EINTR) return false;
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace

bool has_amx() {
  static const bool result = announces_amx() && is_allowed() && works_in_child();
  return result;
}

}  // namespace eqxcallback::cpu
#else
namespace eqxcallback::cpu {

#ifdef EQXCALLBACK_EMULATED_TILES
bool has_amx() { return true; }
#else
bool has_amx() { return false; }
#endif

}  // namespace eqxcallback::cpu
#endif
