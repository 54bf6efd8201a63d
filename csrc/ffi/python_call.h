// The handlers of the python lane: decode, check, lend the buffers, call.
#pragma once

#include <nanobind/nanobind.h>

namespace eqxcallback {

// Returns {target name: {platform: capsule}}, as jax.ffi.register_ffi_target wants them.
nanobind::dict python_call_targets();

}  // namespace eqxcallback
