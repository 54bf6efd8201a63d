// The handlers of the CPU kernels, by the symbols under which a NativeKernel names them.
#pragma once

#include <nanobind/nanobind.h>

namespace eqxcallback {

// {symbol: capsule}
nanobind::dict cpu_ops();

}  // namespace eqxcallback
