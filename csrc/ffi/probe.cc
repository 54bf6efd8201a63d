// The question of XLA's registration, asked in a child process.
#include "ffi/probe.h"

#include <cstring>

namespace eqxcallback {
namespace {

constexpr int kUnsaid = -1;

// Enough of XLA's API for an answer, in the child alone: handlers of other versions answer by an error.
bool has_created_error = false;

XLA_FFI_Error* create_error(XLA_FFI_Error_Create_Args*) {
  static char error;
  has_created_error = true;
  return reinterpret_cast<XLA_FFI_Error*>(&error);
}

bool answers(XLA_FFI_Handler* function) {
  XLA_FFI_Api api{};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
  api.api_version.major_version = XLA_FFI_API_MAJOR;
  api.api_version.minor_version = XLA_FFI_API_MINOR;
  api.XLA_FFI_Error_Create = create_error;

  XLA_FFI_Metadata metadata{};
  metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  metadata.api_version.major_version = metadata.api_version.minor_version = kUnsaid;
  XLA_FFI_Metadata_Extension extension{};
  extension.extension_base.struct_size = XLA_FFI_Metadata_Extension_STRUCT_SIZE;
  extension.extension_base.type = XLA_FFI_Extension_Metadata;
  extension.metadata = &metadata;
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.extension_start = &extension.extension_base;
  frame.api = &api;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args.struct_size = XLA_FFI_Args_STRUCT_SIZE;
  frame.rets.struct_size = XLA_FFI_Rets_STRUCT_SIZE;
  frame.attrs.struct_size = XLA_FFI_Attrs_STRUCT_SIZE;
  const XLA_FFI_Error* error = function(&frame);
  const bool has_version =
      metadata.api_version.major_version != kUnsaid || metadata.api_version.minor_version != kUnsaid;
  return has_created_error || (error == nullptr && has_version);
}

}  // namespace

Answer ask_for_metadata(XLA_FFI_Handler* function, double seconds, const Waiting& waiting) {
  SharedMemory shared(sizeof(bool));
  bool& is_handler = *static_cast<bool*>(shared.data());
  Answer answer;
  answer.ending = run_in_child(seconds, [&] { is_handler = answers(function); }, waiting);
  answer.is_handler = is_handler && answer.ending.kind == Ending::Kind::kReturned;
  return answer;
}

}  // namespace eqxcallback
