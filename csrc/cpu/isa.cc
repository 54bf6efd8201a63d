// The choice of a table of kernels: by EQXCALLBACK_ISA, by `set_isa`, or the best one of the machine.
#include "cpu/isa.h"

#include <atomic>
#include <cstdlib>
#include <iterator>
#include <new>
#include <stdexcept>

#include "cpu/amx.h"
#include "cpu/measured.h"

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
  // True if this table differs from the next one, which is available too, only in how it multiplies bf16: it is not
  // known which of them is faster.
  bool only_bf16_differs;
};

#if defined(EQXCALLBACK_X86)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
bool has_avx512_amx() { return has_avx512_bf16() && has_amx(); }
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#elif defined(EQXCALLBACK_ARM)
// Asks the system, as __builtin_cpu_supports of g++ 12 knows x86 alone.
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
#if defined(EQXCALLBACK_EMULATED_TILES)
    {"avx512_amx", &kAvx512AmxKernels, has_avx512_amx, false},
#elif defined(EQXCALLBACK_X86)
    {"avx512_amx", &kAvx512AmxKernels, has_avx512_amx, true},
    {"avx512_bf16", &kAvx512Bf16Kernels, has_avx512_bf16, true},
    {"avx512", &kAvx512Kernels, has_avx512, false},
    {"avx2", &kAvx2Kernels, has_avx2, false},
#elif defined(EQXCALLBACK_ARM)
    {"neon_bf16", &kNeonBf16Kernels, has_neon_bf16, true},
    {"neon_dot", &kNeonDotKernels, has_neon_dot, false},
    {"neon", &kNeonKernels, always, false},
#endif
    {"portable", &kPortableKernels, always, false},
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

const Isa& best() {
  for (const Isa& isa : kIsas) {
    if (isa.available()) return isa;
  }
  return std::end(kIsas)[-1];
}

// The kernels that run if no one has chosen.
const Mixed& usual() {
  static const Mixed mixed = [] {
    std::vector<Table> tables;
    const Isa* isa = &best();
    for (; isa->only_bf16_differs; ++isa) tables.push_back({isa->name, isa->kernels});
    tables.push_back({isa->name, isa->kernels});
    return tables.size() == 1 ? Mixed{*isa->kernels, {}, {}} : fastest_of(tables);
  }();
  return mixed;
}

// The table that set_isa has chosen, or null.
std::atomic<const Kernels*> set{nullptr};

// Returns the table in use. Throws at each use if the variable is wrong.
const Kernels& current() {
  if (const Kernels* const kernels = set.load(std::memory_order_relaxed)) return *kernels;
  static const Kernels& initial = []() -> const Kernels& {
    const char* wanted = std::getenv("EQXCALLBACK_ISA");
    return wanted != nullptr && *wanted != '\0' ? *find(wanted).kernels : usual().kernels;
  }();
  return initial;
}

// Returns the instruction set that the variable or set_isa has chosen, or null.
const Isa* chosen() {
  const Kernels* const now = &current();
  for (const Isa& isa : kIsas) {
    if (isa.kernels == now) return &isa;
  }
  return nullptr;
}

}  // namespace

void throw_bad_alloc() { throw std::bad_alloc(); }

const Kernels& kernels() { return current(); }

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : kIsas) {
    if (isa.available()) names.emplace_back(isa.name);
  }
  return names;
}

std::string isa() { return chosen() != nullptr ? chosen()->name : best().name; }
std::vector<std::pair<std::string, std::string>> isas_of_bf16() {
  return chosen() != nullptr ? decltype(Mixed::families){} : usual().families;
}
std::string file_of_bf16() { return chosen() != nullptr ? std::string() : usual().file; }
void set_isa(const std::string& name) { set = find(name).kernels; }

}  // namespace eqxcallback::cpu
