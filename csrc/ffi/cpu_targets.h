// The CPU kernels as Python sees them: the targets that XLA calls, and the hook of checked mode.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "ffi/child_process.h"

namespace eqxcallback {

// Returns {symbol: (capsule, capsule)}, sorted by symbol: the target, and one that calls it for each example of a
// batch.
nanobind::dict cpu_targets();

// Binds `_ext.set_checked_native`. See checked_call.h.
void bind_checked_call(nanobind::module_& m);

// Makes a str of a text of a user's code, whatever its encoding.
nanobind::object text_object(const std::string& text);

// Makes a tuple of the end of a child process: (kind, number, address, whether it was a write, text).
nanobind::object ending_object(const Ending& ending);

}  // namespace eqxcallback
