// What Python sees of the CPU kernels: the targets that XLA calls, and the hook of checked mode.
#pragma once

#include <nanobind/nanobind.h>

namespace eqxcallback {

// {symbol: capsule}, sorted by symbol.
nanobind::dict cpu_targets();

// `_ext.set_checked_native`. See checked_call.h.
void bind_checked_call(nanobind::module_& m);

}  // namespace eqxcallback
