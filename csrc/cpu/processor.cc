#include "cpu/processor.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace eqxcallback::cpu {
namespace {

#if defined(__x86_64__)
// AMD's number of a family: 25 are Zen 3 and 4, 26 is Zen 5. 0 on a processor of another vendor.
unsigned family_of_amd() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  __cpuid(0, eax, ebx, ecx, edx);
  if (ebx != signature_AMD_ebx || ecx != signature_AMD_ecx || edx != signature_AMD_edx) return 0;
  __cpuid(1, eax, ebx, ecx, edx);
  return ((eax >> 8) & 0xf) + ((eax >> 20) & 0xff);
}
#else
unsigned family_of_amd() { return 0; }
#endif

}  // namespace

const Prefetching& prefetching() {
  static const Prefetching result = family_of_amd() >= 26 ? Prefetching{true, 4096} : Prefetching{};
  return result;
}

}  // namespace eqxcallback::cpu
