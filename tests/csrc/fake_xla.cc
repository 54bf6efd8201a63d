// Calls a handler as XLA does on a GPU: a call frame with a stream, a device ordinal, operands, results and attributes.
// The memory behind it is the host's. So the GPU handler's own code runs on a machine without a GPU.
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "xla/ffi/api/c_api.h"

struct XLA_FFI_Error {
  std::string message;
  XLA_FFI_Error_Code code;
};

namespace {

void* g_stream;
int32_t g_ordinal;

XLA_FFI_Error* error_create(XLA_FFI_Error_Create_Args* args) { return new XLA_FFI_Error{args->message, args->errc}; }
void error_destroy(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }
XLA_FFI_Error* stream_get(XLA_FFI_Stream_Get_Args* args) { return args->stream = g_stream, nullptr; }
XLA_FFI_Error* ordinal_get(XLA_FFI_DeviceOrdinal_Get_Args* args) { return args->device_ordinal = g_ordinal, nullptr; }

XLA_FFI_Api make_api() {
  XLA_FFI_Api api = {};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = error_create;
  api.XLA_FFI_Error_Destroy = error_destroy;
  api.XLA_FFI_Stream_Get = stream_get;
  api.XLA_FFI_DeviceOrdinal_Get = ordinal_get;
  return api;
}

}  // namespace

extern "C" {

// One operand and one result of the same type. Returns the error's code, and its text in `message`.
int call(XLA_FFI_Handler* handler, uint64_t key, int dtype, void* in, void* out, int64_t rank, int64_t* dims,
         uintptr_t stream, int32_t ordinal, char* message, size_t message_size) {
  static const XLA_FFI_Api api = make_api();
  g_stream = reinterpret_cast<void*>(stream);
  g_ordinal = ordinal;

  const auto type = static_cast<XLA_FFI_DataType>(dtype);
  XLA_FFI_Buffer operand{XLA_FFI_Buffer_STRUCT_SIZE, nullptr, type, in, rank, dims};
  XLA_FFI_Buffer result{XLA_FFI_Buffer_STRUCT_SIZE, nullptr, type, out, rank, dims};
  XLA_FFI_ArgType arg_type = XLA_FFI_ArgType_BUFFER;
  XLA_FFI_RetType ret_type = XLA_FFI_RetType_BUFFER;
  void* args[] = {&operand};
  void* rets[] = {&result};
  XLA_FFI_Scalar scalar{XLA_FFI_DataType_U64, &key};
  XLA_FFI_ByteSpan name{"key", 3};
  XLA_FFI_AttrType attr_type = XLA_FFI_AttrType_SCALAR;
  XLA_FFI_ByteSpan* names[] = {&name};
  void* attrs[] = {&scalar};

  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, 1, &arg_type, args};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, 1, &ret_type, rets};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, 1, &attr_type, names, attrs};

  XLA_FFI_Error* error = handler(&frame);
  if (error == nullptr) return 0;
  std::strncpy(message, error->message.c_str(), message_size - 1);
  const int code = error->code;
  delete error;
  return code;
}

// Whether the handler's metadata has the command-buffer trait.
int is_captured(XLA_FFI_Handler* handler) {
  static const XLA_FFI_Api api = make_api();
  XLA_FFI_Metadata metadata = {};
  metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  metadata.api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
  XLA_FFI_Metadata_Extension extension = {{XLA_FFI_Metadata_Extension_STRUCT_SIZE, XLA_FFI_Extension_Metadata, nullptr},
                                          &metadata};
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.extension_start = &extension.extension_base;
  frame.api = &api;
  if (handler(&frame) != nullptr) return -1;
  return (metadata.traits & XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE) != 0;
}
}
