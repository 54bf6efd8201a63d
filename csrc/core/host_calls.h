// Counts the calls of kernels that the host makes: those of the python lane and of the launcher. Kernels that a GPU
// replays from a command buffer are not counted.
#pragma once

#include <atomic>
#include <cstdint>

namespace eqxcallback {

inline std::atomic<uint64_t> host_calls{0};

}  // namespace eqxcallback
