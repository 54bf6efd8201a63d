// What an error of a handler says: XLA's API makes errors of a code and a text, and does not tell the code again.
#pragma once

#include <string>

#include "xla/ffi/api/c_api.h"

namespace eqxcallback {

struct CreatedError {
  XLA_FFI_Error* error = nullptr;
  XLA_FFI_Error_Code code = XLA_FFI_Error_Code_UNKNOWN;
  std::string message;
};

// The last error that a handler made in this thread. Whoever makes errors for handlers sets it.
inline CreatedError& last_created_error() {
  static thread_local CreatedError last;
  return last;
}

inline XLA_FFI_Error* create_error(const XLA_FFI_Api* api, XLA_FFI_Error_Code code, const std::string& message) {
  XLA_FFI_Error_Create_Args args{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, message.c_str(), code};
  return api->XLA_FFI_Error_Create(&args);
}

}  // namespace eqxcallback
