// The handlers that launch GPU kernels.
#pragma once

#include <nanobind/nanobind.h>

namespace eqxcallback {

// Returns `{target: {platform: {stage: capsule}}}`. The handlers for "cpu" are for tests with a fake driver.
nanobind::dict gpu_launch_targets();

// Returns what `jax.ffi.register_ffi_type` takes for the state that a handler keeps for each call of a program.
nanobind::dict gpu_launch_type();

}  // namespace eqxcallback
