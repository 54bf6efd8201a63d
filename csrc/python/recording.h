// Recording: one call of a Python kernel on a stream that is being captured, and what came of it.
//
// Contract: the kernel gets Buffers of its own over the memory of the given ones. They die with the call; the given
// ones stay as they are. What the kernel enqueued has not run, unless it was enqueued on another stream.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <utility>

#include "gpu/capture.h"
#include "python/context.h"

namespace eqxcallback {

class Recording {
 public:
  // `body` is called as a Handle calls it. See there for `direct`.
  Recording(nb::object body, bool direct, const ExecutionContext& ctx, nb::tuple outputs, nb::tuple inputs);

  // What the kernel raised, or None. Once: its traceback has frames that hold this object.
  nb::object take_error() { return std::exchange(error_, nb::none()); }
  // The driver's code for the end of the capture, and its text. 0: there is a graph.
  int code() const { return code_; }
  const std::string& message() const { return message_; }
  // {kind: count}
  nb::dict nodes() const;

  // Runs what was recorded, on the stream of the call. `unwritten` Buffers are filled with noise before.
  void replay(nb::tuple unwritten) const;

 private:
  gpu::Stream stream_;  // of the call
  gpu::Capture capture_;
  nb::object error_ = nb::none();
  int code_ = 0;
  std::string message_;
};

void bind_recording(nb::module_& m);

}  // namespace eqxcallback
