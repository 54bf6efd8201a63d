// XLA's own threads as the executor of a kernel.
#pragma once

#include "cpu/executor.h"
#include "xla/ffi/api/ffi.h"

namespace eqxcallback {

// `pool` has to outlive what runs on it: it belongs to the call.
cpu::Executor executor_on(xla::ffi::ThreadPool& pool);

}  // namespace eqxcallback
