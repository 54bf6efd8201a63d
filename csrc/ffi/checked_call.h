// Native kernels in checked mode: their operands and results go to Python as Buffers, which calls the kernel from
// there. Nothing of Python in this header, which handlers include.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace eqxcallback {

// Runs `handler`. In checked mode it is called by the Python function that was set with `_ext.set_checked_native`,
// `hook(symbol, run, outputs, inputs)`, where `run()` calls it on the memory that the Buffers have by then.
XLA_FFI_Error* run_checked(const char* symbol, XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame);

}  // namespace eqxcallback
