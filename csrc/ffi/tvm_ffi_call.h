// The handlers of functions of the TVM-FFI ABI.
#pragma once

#include <nanobind/nanobind.h>

namespace eqxcallback {

// Binds `_ext.tvm_ffi_handlers`, the handlers' addresses, and `_ext.set_tvm_ffi_runtime`.
void bind_tvm_ffi_call(nanobind::module_& m);

}  // namespace eqxcallback
