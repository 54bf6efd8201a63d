// Large arrays in huge pages. XLA gives a large result memory that was never touched, and the system maps it page by
// page while the kernel writes. With pages of 4 KiB that takes longer than what the kernel does: 50 of the 70 ms of a
// softmax of 128 MiB. Linux maps 2 MiB at a time if it is asked to, as NumPy asks for its arrays.
#pragma once

#include <cstddef>

#include "xla/ffi/api/c_api.h"

namespace eqxcallback {

// Asks for huge pages in memory that is about to be written. This is a hint: memory that is already mapped stays as it
// is, and a system without huge pages does nothing.
void prefer_huge_pages(void* data, size_t bytes);

// Moves memory that is in use into huge pages, now, with whatever else is in them, and returns how much of it is in
// them then: 0 on a system that cannot. Its content and addresses stay. Weights are read in streams, and with pages of
// 4 KiB a virtual machine looks up an address for each of them.
size_t move_into_huge_pages(void* data, size_t bytes);

// Asks for huge pages for the results of a call, except for results in the memory of an operand.
void prefer_huge_pages(const XLA_FFI_CallFrame& frame);

}  // namespace eqxcallback
