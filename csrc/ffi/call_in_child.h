// One call of a user's handler in a child process, on guarded copies of its operands and results. This file needs no
// Python.
#pragma once

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "ffi/child_process.h"
#include "ffi/guarded_memory.h"
#include "xla/ffi/api/c_api.h"

namespace eqxcallback {

// A handler of a user's library.
struct UserKernel {
  XLA_FFI_Handler* handler = nullptr;
  // `omp_set_num_threads` of the library, if it has OpenMP: a child has none of its parent's threads, and OpenMP would
  // wait for them.
  void (*set_threads)(int) = nullptr;
  std::atomic<bool> reads_attributes{false};  // true once it was seen to read them
};

// The outcome of a call. Results come before operands wherever there is an index.
struct ChildCall {
  struct Overrun {
    size_t index;
    bool is_after;
    Beside bytes;
  };
  struct Fault {
    size_t index;
    bool is_after;
    size_t distance;
  };
  struct Error {
    XLA_FFI_Error_Code code;
    std::string message;
  };

  Ending ending;
  std::vector<Overrun> overruns;
  std::optional<Fault> fault;  // the place at which the child died, if that is beside an operand or result
  std::optional<Error> error;  // what the handler returned
  std::vector<std::string> ignored_attributes;
  bool is_asynchronous = false;  // the handler returned a future, and its work is not done
};

// Calls the kernel as `frame` says. The buffers of `frame` have memory that may be written, and are written if the call
// ends.
ChildCall call_in_child(UserKernel& kernel, const XLA_FFI_CallFrame& frame, double seconds, const Waiting& waiting);

}  // namespace eqxcallback
