// The handler of all plain C functions.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace eqxcallback {

// The function that the handler calls, while this exists, on this thread. A handler is told no more than what XLA tells
// it, which does not know of functions.
class CalledFunction {
 public:
  explicit CalledFunction(const void* function);
  ~CalledFunction();
  CalledFunction(const CalledFunction&) = delete;
  CalledFunction& operator=(const CalledFunction&) = delete;

  static const void* get();

 private:
  const void* before_;
};

// A number that other processes do not have.
int64_t this_process();

// `_ext.c_call_handler`, its address, and `_ext.most_on_stack`: see plain_call.h.
void bind_c_call(nanobind::module_& m);

}  // namespace eqxcallback
