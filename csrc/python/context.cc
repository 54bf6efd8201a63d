#include "python/context.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

namespace eqxcallback {
namespace {

std::optional<uintptr_t> stream(const ExecutionContext& ctx) {
  if (ctx.place.platform == Platform::kCpu) return std::nullopt;
  return ctx.place.stream;
}

std::string repr(const ExecutionContext& ctx) {
  const std::optional<uintptr_t> handle = stream(ctx);
  return std::string("ExecutionContext(platform=") + platform_name(ctx.place.platform) +
         ", device_ordinal=" + std::to_string(ctx.place.ordinal) +
         ", stream=" + (handle ? std::to_string(*handle) : "None") + ")";
}

}  // namespace

void bind_context(nb::module_& m) {
  nb::enum_<Stage>(m, "ExecutionStage", "XLA's stages of a call. A Python kernel runs in EXECUTE only.")
      .value("INSTANTIATE", Stage::kInstantiate)
      .value("PREPARE", Stage::kPrepare)
      .value("INITIALIZE", Stage::kInitialize)
      .value("EXECUTE", Stage::kExecute);

  nb::class_<ExecutionContext>(m, "ExecutionContext", "What a kernel is told about the call it serves.")
      .def(nb::init<>())
      .def_prop_ro("stage", [](const ExecutionContext& ctx) { return ctx.stage; })
      .def_prop_ro("stream", &stream)
      .def_prop_ro("device_ordinal", [](const ExecutionContext& ctx) { return ctx.place.ordinal; })
      .def_prop_ro("platform", [](const ExecutionContext& ctx) { return platform_name(ctx.place.platform); })
      .def("__repr__", &repr);
}

}  // namespace eqxcallback
