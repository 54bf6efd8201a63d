// Calls the launcher's handlers as XLA does on a GPU: in stages, with a stream and a device ordinal.
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
void* g_state;

XLA_FFI_Error* error_create(XLA_FFI_Error_Create_Args* args) { return new XLA_FFI_Error{args->message, args->errc}; }
void error_destroy(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }
XLA_FFI_Error* stream_get(XLA_FFI_Stream_Get_Args* args) { return args->stream = g_stream, nullptr; }
XLA_FFI_Error* ordinal_get(XLA_FFI_DeviceOrdinal_Get_Args* args) { return args->device_ordinal = g_ordinal, nullptr; }
XLA_FFI_Error* state_set(XLA_FFI_State_Set_Args* args) { return g_state = args->state, nullptr; }
XLA_FFI_Error* state_get(XLA_FFI_State_Get_Args* args) { return args->state = g_state, nullptr; }

XLA_FFI_Api make_api() {
  XLA_FFI_Api api = {};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = error_create;
  api.XLA_FFI_Error_Destroy = error_destroy;
  api.XLA_FFI_Stream_Get = stream_get;
  api.XLA_FFI_DeviceOrdinal_Get = ordinal_get;
  api.XLA_FFI_State_Set = state_set;
  api.XLA_FFI_State_Get = state_get;
  return api;
}

XLA_FFI_ByteSpan span(const char* text) { return {text, std::strlen(text)}; }

}  // namespace

extern "C" {

// Runs one stage: 0 instantiate, 1 initialize, 2 execute. The kernel has one operand and one result, of three f32.
int run_stage(XLA_FFI_Handler* handler, int stage, const char* image, int64_t* geometry, void* in, void* out,
              uintptr_t stream, int32_t ordinal, char* message, size_t message_size) {
  static const XLA_FFI_Api api = make_api();
  g_stream = reinterpret_cast<void*>(stream);
  g_ordinal = ordinal;

  int64_t dims[] = {3}, size = static_cast<int64_t>(std::strlen(image));
  XLA_FFI_Buffer operand{XLA_FFI_Buffer_STRUCT_SIZE, nullptr, XLA_FFI_DataType_F32, in, 1, dims};
  XLA_FFI_Buffer result{XLA_FFI_Buffer_STRUCT_SIZE, nullptr, XLA_FFI_DataType_F32, out, 1, dims};
  XLA_FFI_ArgType arg_type = XLA_FFI_ArgType_BUFFER;
  XLA_FFI_RetType ret_type = XLA_FFI_RetType_BUFFER;
  void *args[] = {&operand}, *rets[] = {&result};

  // Attributes come sorted by name.
  XLA_FFI_ByteSpan entries = span("entry"), who = span("a test");
  XLA_FFI_Array words{XLA_FFI_DataType_S64, 8, geometry};
  XLA_FFI_Array images{XLA_FFI_DataType_U8, static_cast<size_t>(size), const_cast<char*>(image)};
  XLA_FFI_Array sizes{XLA_FFI_DataType_S64, 1, &size};
  XLA_FFI_ByteSpan texts[] = {span("entries"), span("geometry"), span("images"), span("sizes"), span("who")};
  XLA_FFI_ByteSpan* names[] = {&texts[0], &texts[1], &texts[2], &texts[3], &texts[4]};
  XLA_FFI_AttrType types[] = {XLA_FFI_AttrType_STRING, XLA_FFI_AttrType_ARRAY, XLA_FFI_AttrType_ARRAY,
                              XLA_FFI_AttrType_ARRAY, XLA_FFI_AttrType_STRING};
  void* attrs[] = {&entries, &words, &images, &sizes, &who};

  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  const XLA_FFI_ExecutionStage stages[] = {XLA_FFI_ExecutionStage_INSTANTIATE, XLA_FFI_ExecutionStage_INITIALIZE,
                                           XLA_FFI_ExecutionStage_EXECUTE};
  frame.stage = stages[stage];
  // To instantiate there are no buffers yet.
  const int64_t buffers = stage == 0 ? 0 : 1;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, buffers, &arg_type, args};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, buffers, &ret_type, rets};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, 5, types, names, attrs};

  XLA_FFI_Error* error = handler(&frame);
  if (error == nullptr) return 0;
  std::strncpy(message, error->message.c_str(), message_size - 1);
  const int code = error->code;
  delete error;
  return code;
}
}
