// ExecutionContext: what a Python kernel is told about the call that it serves.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "python/buffer.h"

namespace eqxcallback {

// XLA's stages, in its order. Our Python handlers are registered for kExecute only.
enum class Stage : uint8_t { kInstantiate, kPrepare, kInitialize, kExecute };

struct ExecutionContext {
  Stage stage = Stage::kExecute;
  Place place;
  std::vector<nb::object> entered = {};  // CuPy's contexts, for each `with` that is not yet left: a device, a stream
};

// Imports CuPy, or raises an ImportError that begins with `who` and says what to install.
nb::module_ import_cupy(const char* who);

void bind_context(nb::module_& m);

}  // namespace eqxcallback
