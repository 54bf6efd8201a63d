// The extension module eqxcallback._ext: binds what Python uses of the C++.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "core/host_calls.h"
#include "cpu/isa.h"
#include "cpu/processor.h"
#include "ffi/c_call.h"
#include "ffi/cpu_targets.h"
#include "ffi/front.h"
#include "ffi/gpu_launch.h"
#include "ffi/host_callback_scope.h"
#include "ffi/huge_pages.h"
#include "ffi/matrix_product.h"
#include "ffi/python_call.h"
#include "ffi/tvm_ffi_call.h"
#include "gpu/driver.h"
#include "python/buffer.h"
#include "python/context.h"
#include "python/handle.h"
#include "python/recording.h"
#include "python/visit.h"

namespace nb = nanobind;

NB_MODULE(_ext, m) {
  // Programs own handles, and programs may be alive when Python exits: that is not a leak of ours. Tests watch
  // lifetimes.
  nb::set_leak_warnings(false);
  eqxcallback::import_numpy();
  eqxcallback::bind_buffer(m);
  eqxcallback::bind_context(m);
  eqxcallback::bind_handle(m);
  eqxcallback::bind_recording(m);
  eqxcallback::bind_visit(m);
  eqxcallback::bind_checked_call(m);
  eqxcallback::bind_front(m);
  eqxcallback::bind_c_call(m);
  eqxcallback::bind_tvm_ffi_call(m);
  m.def("python_call_targets", &eqxcallback::python_call_targets);
  m.def("cpu_ops", &eqxcallback::cpu_targets);
  m.def("host_calls", [] { return eqxcallback::host_calls.load(); });
  m.def("gpu_launch_targets", &eqxcallback::gpu_launch_targets);
  m.def("gpu_launch_type", &eqxcallback::gpu_launch_type);
  m.def("set_gpu_driver", &eqxcallback::gpu::set_driver, nb::arg("path"));
  m.def("gpu_driver_version", &eqxcallback::gpu::driver_version);
  m.def("isa", &eqxcallback::cpu::isa);
  m.def("isas_of_bf16", [] {
    nb::dict families;
    for (const auto& [family, name] : eqxcallback::cpu::isas_of_bf16()) families[family.c_str()] = name;
    return families;
  });
  m.def("file_of_bf16", &eqxcallback::cpu::file_of_bf16);
  m.def("available_isas", &eqxcallback::cpu::available_isas);
  m.def("vendor", &eqxcallback::cpu::vendor);
  m.def("set_isa", &eqxcallback::cpu::set_isa, nb::arg("name"));
  m.def("matrix_product_bytes", &eqxcallback::matrix_product_bytes, nb::arg("is_f32"), nb::arg("rows"),
        nb::arg("columns"), nb::arg("size"), nb::arg("a_has_columns"), nb::arg("b_has_columns"));
  m.def(
      "multiply_adds", [](int64_t steps) { return eqxcallback::cpu::kernels().multiply_adds(steps); }, nb::arg("steps"),
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "move_into_huge_pages",
      [](uintptr_t data, size_t bytes) {
        return eqxcallback::move_into_huge_pages(reinterpret_cast<void*>(data), bytes);
      },
      nb::arg("data"), nb::arg("bytes"), nb::call_guard<nb::gil_scoped_release>());
  m.def("resume", &eqxcallback::resume, nb::arg("args"));
  m.def("set_jax_handler", &eqxcallback::set_jax_handler, nb::arg("capsule"));
  // A program may own a Handle as a host callback, and then calls it as one. See ffi/host_callback_scope.h.
  nb::object handle = m.attr("Handle");
  handle.attr("__call__") =
      nb::cpp_function([](nb::handle, nb::args args) { eqxcallback::resume(args); }, nb::is_method());
}
