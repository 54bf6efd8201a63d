// The extension module eqxcallback._ext.
#include <nanobind/nanobind.h>

#include "ffi/python_call.h"
#include "python/buffer.h"
#include "python/context.h"
#include "python/handle.h"

NB_MODULE(_ext, m) {
  eqxcallback::import_numpy();
  eqxcallback::bind_buffer(m);
  eqxcallback::bind_context(m);
  eqxcallback::bind_handle(m);
  m.def("python_call_targets", &eqxcallback::python_call_targets);
}
