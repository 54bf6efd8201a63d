// How often a kernel was called on the host: by the python lane, or by the launcher. What a GPU replays from a command
// buffer is not.
#pragma once

#include <atomic>
#include <cstdint>

namespace eqxcallback {

inline std::atomic<uint64_t> host_calls{0};

}  // namespace eqxcallback
