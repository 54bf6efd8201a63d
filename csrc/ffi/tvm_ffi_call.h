// The handlers of all functions of the TVM-FFI ABI.
#pragma once

#include <nanobind/nanobind.h>

namespace eqxcallback {

// `_ext.tvm_ffi_handlers`, their addresses, and `_ext.set_tvm_ffi_runtime`.
void bind_tvm_ffi_call(nanobind::module_& m);

}  // namespace eqxcallback
