// ExecutionContext: its binding, and the streams that `with ctx` makes current.
#include "python/context.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

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

using Self = nb::handle_t<ExecutionContext>;

void need_stream(const ExecutionContext& ctx, const char* who) {
  if (ctx.place.platform != Platform::kCpu) return;
  throw nb::type_error((std::string(who) + ": this call is on a CPU, which has no stream.").c_str());
}

// `__cuda_stream__`, by which libraries take each other's streams: a version, and the address.
nb::tuple cuda_stream(const ExecutionContext& ctx) {
  need_stream(ctx, "ExecutionContext.__cuda_stream__");
  return nb::make_tuple(0, ctx.place.stream);
}

nb::object cupy_stream(Self self) {
  need_stream(nb::cast<ExecutionContext&>(self), "ExecutionContext.cupy_stream");
  return import_cupy("ExecutionContext").attr("cuda").attr("Stream").attr("from_external")(self);
}

void leave(const nb::object& context, const nb::tuple& reason) { context.attr("__exit__")(*reason); }

nb::object enter_stream(Self self) {
  ExecutionContext& ctx = nb::cast<ExecutionContext&>(self);
  if (ctx.place.platform != Platform::kCpu) {
    nb::object stream = cupy_stream(self);
    // CuPy has a current stream for each device, so the device is made current first.
    nb::object device = import_cupy("ExecutionContext").attr("cuda").attr("Device")(ctx.place.ordinal);
    device.attr("__enter__")();
    try {
      stream.attr("__enter__")();
    } catch (nb::python_error&) {
      leave(device, nb::make_tuple(nb::none(), nb::none(), nb::none()));
      throw;
    }
    ctx.entered.push_back(std::move(device));
    ctx.entered.push_back(std::move(stream));
  }
  return nb::borrow(self);
}

void leave_stream(Self self, const nb::args& reason) {
  ExecutionContext& ctx = nb::cast<ExecutionContext&>(self);
  if (ctx.place.platform == Platform::kCpu) return;
  if (ctx.entered.empty()) throw std::runtime_error("ExecutionContext: it was left more often than entered.");
  const nb::object stream = std::move(ctx.entered.back());
  ctx.entered.pop_back();
  const nb::object device = std::move(ctx.entered.back());
  ctx.entered.pop_back();
  try {
    leave(stream, reason);
  } catch (nb::python_error&) {
    leave(device, reason);
    throw;
  }
  leave(device, reason);
}

}  // namespace

nb::module_ import_cupy(const char* who) {
  try {
    return nb::module_::import_("cupy");
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_ImportError)) throw;
    nb::raise_from(
        error, PyExc_ImportError,
        "%s: CuPy cannot be imported. Install eqxcallback[cuda12] or eqxcallback[cuda13], which bring it, or "
        "launch on ctx.stream with another library.",
        who);
  }
}

void bind_context(nb::module_& m) {
  nb::enum_<Stage>(m, "ExecutionStage", "XLA's stages of a call. A Python kernel runs in EXECUTE only.")
      .value("INSTANTIATE", Stage::kInstantiate)
      .value("PREPARE", Stage::kPrepare)
      .value("INITIALIZE", Stage::kInitialize)
      .value("EXECUTE", Stage::kExecute);

  nb::class_<ExecutionContext>(m, "ExecutionContext", "Describes to a kernel the call that it serves.")
      .def(nb::init<>())
      .def_prop_ro("stage", [](const ExecutionContext& ctx) { return ctx.stage; })
      .def_prop_ro("stream", &stream)
      .def_prop_ro("device_ordinal", [](const ExecutionContext& ctx) { return ctx.place.ordinal; })
      .def_prop_ro("platform", [](const ExecutionContext& ctx) { return platform_name(ctx.place.platform); })
      .def("cupy_stream", &cupy_stream)
      .def("__cuda_stream__", &cuda_stream)
      .def("__enter__", &enter_stream)
      .def("__exit__", &leave_stream)
      .def("__repr__", &repr);
}

}  // namespace eqxcallback
