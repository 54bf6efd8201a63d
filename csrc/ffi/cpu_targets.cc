#include "ffi/cpu_targets.h"

#include <array>
#include <stdexcept>
#include <utility>

#include "ffi/capsule.h"
#include "ffi/checked_call.h"
#include "ffi/cpu_ops.h"

namespace eqxcallback {
namespace {

const CpuOps& all() {
  static const CpuOps ops = [] {
    CpuOps found;
    for (const CpuOps& some : {attention_ops(), cache_ops(), glu_ops(), linear_ops(), loss_ops(), norm_ops(),
                               norm_backward_ops(), quantized_ops(), recurrent_ops(), rotary_ops()}) {
      found.insert(found.end(), some.begin(), some.end());
    }
    return found;
  }();
  return ops;
}

// XLA calls a handler with a frame and nothing else: each has a function of its own that knows which one it is.
template <size_t i>
XLA_FFI_Error* target(XLA_FFI_CallFrame* frame) {
  const auto& [symbol, handler] = all()[i];
  return run_checked(symbol, handler, frame);
}

template <size_t... i>
constexpr std::array<XLA_FFI_Handler*, sizeof...(i)> targets(std::index_sequence<i...>) {
  return {target<i>...};
}
constexpr auto kTargets = targets(std::make_index_sequence<64>());

}  // namespace

nanobind::dict cpu_targets() {
  if (all().size() > kTargets.size())
    throw std::length_error("eqxcallback: more CPU kernels than cpu_targets.cc has room for");
  nanobind::dict symbols;
  for (size_t i = 0; i < all().size(); ++i) symbols[all()[i].first] = capsule(kTargets[i]);
  return symbols;
}

}  // namespace eqxcallback
