// Calls a handler as XLA does on a GPU, with a stream and a device ordinal. The result is five numbers, on the host.
#include <cstdint>
#include <cstring>
#include <string>

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

XLA_FFI_ByteSpan span(const char* text) { return {text, std::strlen(text)}; }

}  // namespace

extern "C" int run_frame(XLA_FFI_Handler* handler, int64_t handle, int64_t process, int64_t* numbers, size_t count,
                         int64_t* out, uintptr_t stream, int32_t ordinal, char* message, size_t message_size) {
  static const XLA_FFI_Api api = make_api();
  g_stream = reinterpret_cast<void*>(stream);
  g_ordinal = ordinal;

  int64_t dims[] = {5};
  XLA_FFI_Buffer result{XLA_FFI_Buffer_STRUCT_SIZE, nullptr, XLA_FFI_DataType_S64, out, 1, dims};
  XLA_FFI_RetType ret_type = XLA_FFI_RetType_BUFFER;
  void* rets[] = {&result};

  // Attributes come sorted by name.
  XLA_FFI_Scalar handles{XLA_FFI_DataType_S64, &handle}, processes{XLA_FFI_DataType_S64, &process};
  XLA_FFI_Array parameters{XLA_FFI_DataType_S64, count, numbers};
  XLA_FFI_ByteSpan texts = span("");
  XLA_FFI_ByteSpan spans[] = {span("handle"), span("parameters"), span("process"), span("texts")};
  XLA_FFI_ByteSpan* names[] = {&spans[0], &spans[1], &spans[2], &spans[3]};
  XLA_FFI_AttrType types[] = {XLA_FFI_AttrType_SCALAR, XLA_FFI_AttrType_ARRAY, XLA_FFI_AttrType_SCALAR,
                              XLA_FFI_AttrType_STRING};
  void* attrs[] = {&handles, &parameters, &processes, &texts};

  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, 0, nullptr, nullptr};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, 1, &ret_type, rets};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, 4, types, names, attrs};

  XLA_FFI_Error* error = handler(&frame);
  if (error == nullptr) return 0;
  std::strncpy(message, error->message.c_str(), message_size - 1);
  const int code = error->code;
  delete error;
  return code;
}
