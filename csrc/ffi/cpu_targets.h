// The handlers of the CPU kernels as XLA calls them: in checked mode, by way of Python.
#pragma once

#include <nanobind/nanobind.h>

namespace eqxcallback {

// {symbol: capsule}
nanobind::dict cpu_targets();

}  // namespace eqxcallback
