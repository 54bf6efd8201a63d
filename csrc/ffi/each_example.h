// A handler that calls another one for each example of a batch, on XLA's threads. Each call sees the shapes of one.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace eqxcallback {

// What `call_each_example` calls, while this exists, on this thread: a handler, and the function that it calls in turn,
// or null: see c_call.h.
class CalledForEach {
 public:
  CalledForEach(XLA_FFI_Handler* handler, const void* function);
  ~CalledForEach();
  CalledForEach(const CalledForEach&) = delete;
  CalledForEach& operator=(const CalledForEach&) = delete;

 private:
  XLA_FFI_Handler* handler_before_;
  const void* function_before_;
};

// The attribute `eqxcallback_examples` says of each operand, then of each result, whether its first axis is that of the
// examples: 1 or 0. The handler does not get it. An error of one example is that of the call, once all have been
// called.
XLA_FFI_Error* call_each_example(XLA_FFI_CallFrame* frame);

}  // namespace eqxcallback
