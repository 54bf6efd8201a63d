// Native kernels in checked mode: their operands and results go to Python as Buffers, which calls the kernel from
// there. Nothing of nanobind in this header, which handlers include.
#pragma once

#include <functional>
#include <string>

#include "ffi/call_in_child.h"
#include "xla/ffi/api/c_api.h"

namespace eqxcallback {

// Runs `handler`. In checked mode it is called by the Python function that was set with `_ext.set_checked_native`,
// `hook(symbol, run, outputs, inputs)`, where `run()` calls it on the memory that the Buffers have by then.
XLA_FFI_Error* run_checked(const char* symbol, XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame);

// The same for a user's kernel, which is called `who()`. There `run()` calls it in a child process, for as many seconds
// as were set with the function, and returns what it did: a dictionary, see `child_call_object`.
XLA_FFI_Error* run_checked_in_child(const std::function<std::string()>& who, UserKernel& kernel,
                                    XLA_FFI_CallFrame* frame);

}  // namespace eqxcallback
