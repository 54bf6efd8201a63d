// A handler that calls another one for each example of a batch, on XLA's threads. A call sees the shapes of one
// example.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace eqxcallback {

// Names what `call_each_example` calls on this thread, while the object exists: a handler, and the function that the
// handler calls in turn, or null. See c_call.h.
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

// Calls the handler for each example. The attribute `eqxcallback_examples`, which the handler does not get, says of
// each operand and then of each result by 1 or 0 if its first axis is the axis of the examples. An error of one example
// becomes the call's, once all examples have been called.
XLA_FFI_Error* call_each_example(XLA_FFI_CallFrame* frame);

}  // namespace eqxcallback
