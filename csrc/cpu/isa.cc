#include "cpu/isa.h"

#include <atomic>
#include <cstdlib>
#include <new>
#include <stdexcept>

// A test builds the portable kernels alone.
#if defined(__x86_64__) && !defined(EQXCALLBACK_PORTABLE)
#define EQXCALLBACK_X86
#elif defined(__aarch64__) && !defined(EQXCALLBACK_PORTABLE)
#define EQXCALLBACK_ARM
#if defined(__APPLE__)
#include <sys/sysctl.h>
#else
#include <sys/auxv.h>
#endif
#endif

namespace eqxcallback::cpu {
namespace {

struct Isa {
  const char* name;
  const Kernels* kernels;
  bool (*available)();
};

#if defined(EQXCALLBACK_X86)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#elif defined(EQXCALLBACK_ARM)
// The system is asked: __builtin_cpu_supports of g++ 12 knows x86 alone.
#if defined(__APPLE__)
bool has(const char* feature) {
  int value = 0;
  size_t size = sizeof(value);
  return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value != 0;  // an older system does not know the name
}
bool has_neon_dot() { return has("hw.optional.arm.FEAT_DotProd"); }
bool has_neon_bf16() { return has_neon_dot() && has("hw.optional.arm.FEAT_BF16"); }
#else
bool has_neon_dot() { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }
bool has_neon_bf16() { return has_neon_dot() && (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0; }
#endif
#endif
bool always() { return true; }

constexpr Isa kIsas[] = {
#if defined(EQXCALLBACK_X86)
    {"avx512_bf16", &kAvx512Bf16Kernels, has_avx512_bf16},
    {"avx512", &kAvx512Kernels, has_avx512},
    {"avx2", &kAvx2Kernels, has_avx2},
#elif defined(EQXCALLBACK_ARM)
    {"neon_bf16", &kNeonBf16Kernels, has_neon_bf16},
    {"neon_dot", &kNeonDotKernels, has_neon_dot},
    {"neon", &kNeonKernels, always},
#endif
    {"portable", &kPortableKernels, always},
};

const Isa& find(const std::string& name) {
  for (const Isa& isa : kIsas) {
    if (isa.name == name && isa.available()) return isa;
  }
  std::string names;
  for (const std::string& available : available_isas()) names += (names.empty() ? "" : ", ") + available;
  throw std::invalid_argument("eqxcallback: expected EQXCALLBACK_ISA to be one of " + names +
                              ", which this machine can run; got '" + name + "'.");
}

const Isa& initial() {
  const char* wanted = std::getenv("EQXCALLBACK_ISA");
  return find(wanted != nullptr && *wanted != '\0' ? wanted : available_isas().front());
}

// Throws at the first use if the variable is wrong, and at each one after it.
std::atomic<const Isa*>& current() {
  static std::atomic<const Isa*> isa{&initial()};
  return isa;
}

}  // namespace

void throw_bad_alloc() { throw std::bad_alloc(); }

const Kernels& kernels() { return *current().load(std::memory_order_relaxed)->kernels; }

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : kIsas) {
    if (isa.available()) names.emplace_back(isa.name);
  }
  return names;
}

std::string isa() { return current().load()->name; }
void set_isa(const std::string& name) { current() = &find(name); }

}  // namespace eqxcallback::cpu
