// The handlers that launch GPU kernels.
#pragma once

#include <nanobind/nanobind.h>

namespace eqxcallback {

// `{target: {platform: {stage: capsule}}}`. Those of the platform "cpu" are for tests with a fake driver.
nanobind::dict gpu_launch_targets();

// What `jax.ffi.register_ffi_type` takes: of the state that a handler keeps for each call of a program.
nanobind::dict gpu_launch_type();

}  // namespace eqxcallback
