// A handler of ours in front of each other handler on a CPU or GPU: it names the kernel and the ops in errors, and
// hands calls to checked mode. A handler is a plain C function, so there is a fixed number of them.
#pragma once

#include <nanobind/nanobind.h>

#include "xla/ffi/api/c_api.h"

namespace eqxcallback {

// In front of a handler of this package, whose errors begin with the op. `handler` itself if all fronts are taken.
XLA_FFI_Handler* front_of_ours(XLA_FFI_Handler* handler);

// `_ext.front`, `_ext.name_caller`, `_ext.describe_function` and `_ext.on_native_error`: see front.cc.
void bind_front(nanobind::module_& m);

}  // namespace eqxcallback
