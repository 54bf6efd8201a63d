// Visit: a stay in Python of one of XLA's own threads.
//
// Python ends a thread that it does not know wherever that asks for the GIL after the interpreter has begun to exit. In
// the middle of a call that ends the process. So Python's exit waits for the visits that have begun, and lets no others
// begin.
#pragma once

#include <nanobind/nanobind.h>

namespace eqxcallback {

// To be made before anything asks for the GIL, and kept until all that has it has given it back.
class Visit {
 public:
  Visit();
  ~Visit();
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;

  // False where there is no Python to call, and in threads of XLA's while it exits.
  bool is_allowed() const { return is_allowed_; }

 private:
  bool is_counted_ = false;
  bool is_allowed_ = false;
};

// Binds `_ext.end_visits()`, which waits until the visits have ended, and refuses others from then on.
void bind_visit(nanobind::module_& m);

}  // namespace eqxcallback
