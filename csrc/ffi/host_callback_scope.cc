// The way through jaxlib's own callback handler, which marks the thread.
#include "ffi/host_callback_scope.h"

#include <Python.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <string_view>

#include "ffi/struct_copy.h"
#include "python/visit.h"

namespace eqxcallback {
namespace {

XLA_FFI_Handler* jax_handler = nullptr;

struct Pending {
  XLA_FFI_Handler* handler;
  XLA_FFI_CallFrame* frame;
  XLA_FFI_Error* error;
};
thread_local Pending* pending = nullptr;

std::optional<uint64_t> host_callback_index(const XLA_FFI_Attrs& attrs) {
  for (int64_t i = 0; i < attrs.size; ++i) {
    if (std::string_view(attrs.names[i]->ptr, attrs.names[i]->len) != "host_callback") continue;
    if (attrs.types[i] != XLA_FFI_AttrType_SCALAR) return std::nullopt;
    const auto* scalar = static_cast<const XLA_FFI_Scalar*>(attrs.attrs[i]);
    if (scalar->dtype != XLA_FFI_DataType_U64) return std::nullopt;
    uint64_t index;
    std::memcpy(&index, scalar->value, sizeof(index));
    return index;
  }
  return std::nullopt;
}

// True on a thread that Python has not seen, which is one of XLA's own.
bool on_pool_thread() { return Py_IsInitialized() && PyGILState_GetThisThreadState() == nullptr; }

}  // namespace

XLA_FFI_Error* run_in_host_callback_scope(XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame) {
  const bool is_metadata_query = frame->extension_start != nullptr;
  if (is_metadata_query || jax_handler == nullptr || !on_pool_thread()) return handler(frame);
  std::optional<uint64_t> index = host_callback_index(frame->attrs);
  if (!index) return handler(frame);
  const Visit visit;
  if (!visit.is_allowed()) return handler(frame);  // which says so

  XLA_FFI_Scalar scalar{XLA_FFI_DataType_U64, &*index};
  XLA_FFI_ByteSpan name{"index", 5};
  XLA_FFI_AttrType type = XLA_FFI_AttrType_SCALAR;
  XLA_FFI_ByteSpan* names[] = {&name};
  void* values[] = {&scalar};
  StructCopy<XLA_FFI_CallFrame> inner(*frame);
  inner->args.size = 0;
  inner->rets.size = 0;
  inner->attrs.size = 1;
  inner->attrs.types = &type;
  inner->attrs.names = names;
  inner->attrs.attrs = values;

  Pending call{handler, frame, nullptr};
  Pending* outer = pending;
  pending = &call;
  XLA_FFI_Error* error = jax_handler(inner.get());
  pending = outer;
  return error != nullptr ? error : call.error;
}

void resume(nanobind::args) {
  if (pending == nullptr) throw std::runtime_error("eqxcallback: a handle is called by XLA only");
  Pending& call = *pending;
  pending = nullptr;  // a program that the callback runs has its own pending call
  call.error = call.handler(call.frame);
  pending = &call;
}

void set_jax_handler(nanobind::capsule capsule) { jax_handler = reinterpret_cast<XLA_FFI_Handler*>(capsule.data()); }

}  // namespace eqxcallback
