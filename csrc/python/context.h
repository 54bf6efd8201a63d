// ExecutionContext: what a Python kernel is told about the call it serves.
#pragma once

#include <nanobind/nanobind.h>

#include "python/buffer.h"

namespace eqxcallback {

// XLA's stages, in its order. Our Python handlers are registered for kExecute only.
enum class Stage : uint8_t { kInstantiate, kPrepare, kInitialize, kExecute };

struct ExecutionContext {
  Stage stage = Stage::kExecute;
  Place place;
};

void bind_context(nb::module_& m);

}  // namespace eqxcallback
