// The handler of plain C functions.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace eqxcallback {

// Names the function that the handler calls on this thread, while the object exists. XLA calls a handler and does not
// know of the function behind it.
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

// Returns a number that no other process has.
int64_t this_process();

// Binds `_ext.c_call_handler`, the handler's address, and `_ext.most_on_stack`: see plain_call.h.
void bind_c_call(nanobind::module_& m);

}  // namespace eqxcallback
