#include "cpu/isa.h"

#include <atomic>
#include <cstdlib>
#include <iterator>
#include <new>
#include <stdexcept>

#include "cpu/measured.h"

// A test builds the portable kernels alone.
#if defined(__x86_64__) && !defined(EQXCALLBACK_PORTABLE)
#define EQXCALLBACK_X86
#endif

namespace eqxcallback::cpu {
namespace {

struct Isa {
  const char* name;
  const Kernels* kernels;
  bool (*available)();
  // From the one that follows it, which is available too, in how bf16 is multiplied: which is faster is not known.
  bool only_bf16_differs;
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
#endif
bool always() { return true; }

constexpr Isa kIsas[] = {
#if defined(EQXCALLBACK_X86)
    {"avx512_bf16", &kAvx512Bf16Kernels, has_avx512_bf16, true},
    {"avx512", &kAvx512Kernels, has_avx512, false},
    {"avx2", &kAvx2Kernels, has_avx2, false},
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

// What runs where nobody chooses.
const Mixed& usual() {
  static const Mixed mixed = [] {
    const Isa& isa = best();
    if (!isa.only_bf16_differs) return Mixed{*isa.kernels, {}};
    const Isa& next = *(&isa + 1);
    return faster_of({isa.name, isa.kernels}, {next.name, next.kernels});
  }();
  return mixed;
}

const Kernels& initial() {
  const char* wanted = std::getenv("EQXCALLBACK_ISA");
  return wanted != nullptr && *wanted != '\0' ? *find(wanted).kernels : usual().kernels;
}

// Throws at the first use if the variable is wrong, and at each one after it.
std::atomic<const Kernels*>& current() {
  static std::atomic<const Kernels*> kernels{&initial()};
  return kernels;
}

// The one that was chosen, or null.
const Isa* chosen() {
  const Kernels* const now = current().load();
  for (const Isa& isa : kIsas) {
    if (isa.kernels == now) return &isa;
  }
  return nullptr;
}

}  // namespace

void throw_bad_alloc() { throw std::bad_alloc(); }

const Kernels& kernels() { return *current().load(std::memory_order_relaxed); }

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
void set_isa(const std::string& name) { current() = find(name).kernels; }

}  // namespace eqxcallback::cpu
