// The registered CPU kernels, as capsules for Python.
#include "ffi/cpu_targets.h"

#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ffi/capsule.h"
#include "ffi/cpu_call.h"
#include "ffi/front.h"

namespace eqxcallback {
namespace {

// In a function, as the registrations of other files may run before the variables of this file exist.
std::vector<std::pair<const char*, XLA_FFI_Handler*>>& registered() {
  static std::vector<std::pair<const char*, XLA_FFI_Handler*>> targets;
  return targets;
}

}  // namespace

CpuRegistration::CpuRegistration(const char* symbol, XLA_FFI_Handler* target) {
  registered().emplace_back(symbol, target);
}

nanobind::dict cpu_targets() {
  std::map<std::string, XLA_FFI_Handler*> sorted;
  for (const auto& [symbol, target] : registered()) {
    // Checked here, as no one could catch an exception from a registration.
    if (!sorted.emplace(symbol, target).second)
      throw std::logic_error(std::string("eqxcallback: two CPU kernels have the symbol ") + symbol);
  }
  nanobind::dict symbols;
  for (const auto& [symbol, target] : sorted) {
    symbols[symbol.c_str()] =
        nanobind::make_tuple(capsule(front_of_ours(target, false)), capsule(front_of_ours(target, true)));
  }
  return symbols;
}

}  // namespace eqxcallback
