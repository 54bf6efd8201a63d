// Probe: asks a function in a child process if it is an XLA FFI handler. A function that is not may do anything.
#pragma once

#include "ffi/child_process.h"
#include "xla/ffi/api/c_api.h"

namespace eqxcallback {

struct Answer {
  Ending ending;
  bool is_handler = false;  // the function answered as handlers do, though perhaps by an error
};

// Calls `function` as XLA does when a handler is registered.
Answer ask_for_metadata(XLA_FFI_Handler* function, double seconds, const Waiting& waiting);

}  // namespace eqxcallback
