// The count of visits, and the wait for their end.
#include "python/visit.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "python/interpreter.h"

namespace eqxcallback {
namespace {

std::atomic<int> visits{0};
std::atomic<bool> has_ended{false};

// A thread that Python has not seen is one of XLA's own.
bool is_foreign() { return PyGILState_GetThisThreadState() == nullptr; }

void end_visits() {
  has_ended = true;
  while (visits > 0) {
    {
      const nanobind::gil_scoped_release released;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
  }
}

}  // namespace

Visit::Visit() {
  if (!python_is_running()) return;
  is_allowed_ = true;
  if (!is_foreign()) return;
  // In this order: either this sees that visits have ended, or who ends them sees this one.
  ++visits;
  is_counted_ = true;
  is_allowed_ = !has_ended;
}

Visit::~Visit() {
  if (is_counted_) --visits;
}

void bind_visit(nanobind::module_& m) {
  // A child has none of the threads whose visits it would wait for.
  pthread_atfork(nullptr, nullptr, [] { visits = 0; });
  m.def("end_visits", &end_visits);
}

}  // namespace eqxcallback
