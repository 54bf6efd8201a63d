// The handlers of the CPU kernels, by the symbols under which a NativeKernel names them. Nothing of Python here.
#pragma once

#include <utility>
#include <vector>

#include "xla/ffi/api/c_api.h"

namespace eqxcallback {

using CpuOps = std::vector<std::pair<const char*, XLA_FFI_Handler*>>;

CpuOps attention_ops();
CpuOps cache_ops();
CpuOps glu_ops();
CpuOps linear_ops();
CpuOps loss_ops();
CpuOps norm_ops();
CpuOps norm_backward_ops();
CpuOps quantized_ops();
CpuOps recurrent_ops();
CpuOps rotary_ops();

}  // namespace eqxcallback
