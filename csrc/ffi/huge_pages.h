// Large results in huge pages. XLA gives a large result memory that nobody has touched, and the system maps it page by
// page while the kernel writes. With pages of 4 KiB that takes longer than what the kernel does: 50 of the 70 ms of a
// softmax of 128 MiB. Linux maps 2 MiB at a time where it is asked to, as NumPy asks for its arrays.
#pragma once

#include <cstddef>

#include "xla/ffi/api/c_api.h"

namespace eqxcallback {

// Asks for huge pages in memory that is about to be written. A hint: memory that is mapped already stays as it is, and
// a system that has no huge pages does nothing.
void prefer_huge_pages(void* data, size_t bytes);

// The same for the results of a call, but for those that are in the memory of an operand.
void prefer_huge_pages(const XLA_FFI_CallFrame& frame);

}  // namespace eqxcallback
