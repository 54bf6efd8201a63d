// Recording: one call of a Python kernel on a stream that is being captured, and the graph that came of it.
//
// Contract: the kernel gets Buffers of its own over the memory of the given ones. The kernel's Buffers die with the
// call; the given ones stay as they are. The work that the kernel enqueued has not run, unless it is on another stream.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <utility>

#include "gpu/capture.h"
#include "python/context.h"

namespace eqxcallback {

class Recording {
 public:
  // Calls `body` as a Handle does, which explains `direct`.
  Recording(nb::object body, bool direct, const ExecutionContext& ctx, nb::tuple outputs, nb::tuple inputs);

  // Returns what the kernel raised, or None. Only once: the traceback has frames that hold this object.
  nb::object take_error() { return std::exchange(error_, nb::none()); }
  // The driver's code for the end of the capture, and its text. The code is 0 if there is a graph.
  int code() const { return code_; }
  const std::string& message() const { return message_; }
  // {kind: count}
  nb::dict nodes() const;

  // Runs the recorded work on the stream of the call. Fills the `unwritten` Buffers with noise before.
  void replay(nb::tuple unwritten) const;

 private:
  gpu::Stream stream_;  // the stream of the call
  gpu::Capture capture_;
  nb::object error_ = nb::none();
  int code_ = 0;
  std::string message_;
};

void bind_recording(nb::module_& m);

}  // namespace eqxcallback
