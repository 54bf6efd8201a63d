#include "cpu/processor.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace eqxcallback::cpu {
namespace {

// AMD's number of a family: 25 are Zen 3 and 4, 26 is Zen 5. 0 on a processor of another vendor.
unsigned family_of_amd() {
#if defined(__x86_64__)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (vendor() == "AuthenticAMD" && __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0) {
    return ((eax >> 8) & 0xf) + ((eax >> 20) & 0xff);
  }
#endif
  return 0;
}

}  // namespace

const std::string& vendor() {
  static const std::string result = [] {
    std::string name;
#if defined(__x86_64__)
    unsigned eax = 0, parts[3] = {};
    if (__get_cpuid(0, &eax, &parts[0], &parts[2], &parts[1]) != 0) {
      name.assign(reinterpret_cast<const char*>(parts), sizeof(parts));
    }
#endif
    return name;
  }();
  return result;
}

const Prefetching& prefetching() {
  static const Prefetching result = [] {
    Prefetching best;
    if (family_of_amd() >= 26) best.into_first_cache = true, best.longest_row = 4096;
    if (vendor() == "GenuineIntel") best.of_one_stream = true;
    return best;
  }();
  return result;
}

}  // namespace eqxcallback::cpu
