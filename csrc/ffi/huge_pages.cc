// The requests for huge pages, by madvise.
#include "ffi/huge_pages.h"

#include <algorithm>
#include <cstdint>

#include "core/dtype.h"
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace eqxcallback {
namespace {

// For smaller results the time of the system call would show, and malloc keeps their memory mapped from call to call.
constexpr size_t kSmallestResult = size_t{4} << 20;
constexpr uintptr_t kPage = uintptr_t{2} << 20;

bool is_operand(const XLA_FFI_CallFrame& frame, const void* data) {
  for (int64_t i = 0; i < frame.args.size; ++i) {
    if (static_cast<const XLA_FFI_Buffer*>(frame.args.args[i])->data == data) return true;
  }
  return false;
}

}  // namespace

void prefer_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#ifdef MADV_HUGEPAGE
  if (bytes < kSmallestResult) return;
  // Whole pages only, so that memory beside the result keeps its pages.
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

size_t move_into_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
  size_t moved = 0;
#ifdef __linux__
  constexpr int kCollapse = 25;  // MADV_COLLAPSE of Linux 6.1, which older headers lack
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data), end = begin + bytes;
  // One at a time: a page at the edge of a mapping cannot be one, and there may be no memory for more.
  for (uintptr_t page = begin / kPage * kPage; page < end; page += kPage) {
    if (madvise(reinterpret_cast<void*>(page), kPage, kCollapse) == 0)
      moved += std::min(end, page + kPage) - std::max(begin, page);
  }
#endif
  return moved;
}

void prefer_huge_pages(const XLA_FFI_CallFrame& frame) {
  if (frame.stage != XLA_FFI_ExecutionStage_EXECUTE) return;
  for (int64_t i = 0; i < frame.rets.size; ++i) {
    if (frame.rets.types[i] != XLA_FFI_RetType_BUFFER) continue;
    const auto& result = *static_cast<const XLA_FFI_Buffer*>(frame.rets.rets[i]);
    if (const size_t bytes = bytes_of(result); bytes >= kSmallestResult && !is_operand(frame, result.data))
      prefer_huge_pages(result.data, bytes);
  }
}

}  // namespace eqxcallback
