// XLA's own threads as the executor of a kernel.
#pragma once

#include "cpu/executor.h"
#include "xla/ffi/api/ffi.h"

namespace eqxcallback {

// Returns an executor on `pool`, which belongs to the call and has to outlive what runs on it.
cpu::Executor executor_on(xla::ffi::ThreadPool& pool);

}  // namespace eqxcallback
