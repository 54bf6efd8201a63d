// Capsules of handlers, which Python hands to JAX.
#pragma once

#include <nanobind/nanobind.h>

#include "xla/ffi/api/c_api.h"

namespace eqxcallback {

inline nanobind::capsule capsule(XLA_FFI_Handler* handler) {
  return nanobind::capsule(reinterpret_cast<void*>(handler));
}

}  // namespace eqxcallback
