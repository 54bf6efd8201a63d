// XLA's mark on a thread that runs a host callback.
//
// XLA runs the programs of a callback on the callback's own thread if that thread bears the mark; otherwise they wait
// for a thread of its pool, and if callbacks block all of these threads (one for each device of a sharded program) they
// wait for ever. The mark is set by a C++ class that jaxlib does not export. It does export its own callback handler,
// which sets the mark and then calls host callback number `index` of the program. So we let that handler call back into
// ours.
#pragma once

#include <nanobind/nanobind.h>

#include "xla/ffi/api/c_api.h"

namespace eqxcallback {

// Runs `handler` on `frame`: inside the mark, if this is a thread of XLA's pool and the program has an attribute
// `host_callback`, the index of a host callback that calls resume().
XLA_FFI_Error* run_in_host_callback_scope(XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame);

// Runs the pending call. jaxlib's handler calls this, with any arguments.
void resume(nanobind::args);

// Sets jaxlib's handler from its capsule. Without the handler, calls run outside of the mark.
void set_jax_handler(nanobind::capsule capsule);

}  // namespace eqxcallback
