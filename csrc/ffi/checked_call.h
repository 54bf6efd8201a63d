// Native kernels in checked mode: their operands and results go as Buffers to Python, which calls the kernel. This
// header has nothing of nanobind, as handlers include it.
#pragma once

#include <functional>
#include <string>

#include "ffi/call_in_child.h"
#include "xla/ffi/api/c_api.h"

namespace eqxcallback {

// Runs `handler`. In checked mode the Python function that was set with `_ext.set_checked_native` runs it: that is
// `hook(symbol, run, outputs, inputs)`, whose `run()` calls the handler on the memory that the Buffers have by then.
XLA_FFI_Error* run_checked(const char* symbol, XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame);

// Does the same for a user's kernel, whose name is `who()`. Here `run()` calls it in a child process, for at most the
// seconds that were set with the function, and returns a dictionary of what it did: see `child_call_object`. Errors of
// checked mode itself, which begin with the name, are made by `api`.
XLA_FFI_Error* run_checked_in_child(const std::function<std::string()>& who, UserKernel& kernel,
                                    XLA_FFI_CallFrame* frame, const XLA_FFI_Api* api);

}  // namespace eqxcallback
