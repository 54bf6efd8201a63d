// CreatedError: code and text of a handler's error. XLA's API makes errors of both, and does not tell the code again.
#pragma once

#include <string>

#include "xla/ffi/api/c_api.h"

namespace eqxcallback {

struct CreatedError {
  XLA_FFI_Error* error = nullptr;
  XLA_FFI_Error_Code code = XLA_FFI_Error_Code_UNKNOWN;
  std::string message;
};

// The last error that a handler made in this thread. The functions that make errors for handlers set it.
inline CreatedError& last_created_error() {
  static thread_local CreatedError last;
  return last;
}

inline XLA_FFI_Error* create_error(const XLA_FFI_Api* api, XLA_FFI_Error_Code code, const std::string& message) {
  XLA_FFI_Error_Create_Args args{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, message.c_str(), code};
  return api->XLA_FFI_Error_Create(&args);
}

inline void destroy_error(const XLA_FFI_Api* api, XLA_FFI_Error* error) {
  XLA_FFI_Error_Destroy_Args args{XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, error};
  api->XLA_FFI_Error_Destroy(&args);
}

}  // namespace eqxcallback
