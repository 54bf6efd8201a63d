// Front: a handler of ours before each other handler on a CPU or GPU. It names the kernel and the ops in errors, and
// hands calls to checked mode. A handler is a plain C function, so the number of fronts is fixed.
#pragma once

#include <nanobind/nanobind.h>

#include "xla/ffi/api/c_api.h"

namespace eqxcallback {

// Returns a front for a handler of this package, whose errors begin with the op. With `for_each` the handler is called
// for each example of a batch: see each_example.h. Throws if all fronts are taken.
XLA_FFI_Handler* front_of_ours(XLA_FFI_Handler* handler, bool for_each);

// Binds `_ext.front`, `_ext.name_caller`, `_ext.describe_function` and `_ext.on_native_error`: see front.cc.
void bind_front(nanobind::module_& m);

}  // namespace eqxcallback
