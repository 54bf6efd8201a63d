// Futures of handlers that go on after their call, of which several are one to XLA. XLA's API makes futures and
// completes them, and lets nobody wait for one: handlers that are called for examples get functions of ours in its
// place.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "ffi/struct_copy.h"
#include "xla/ffi/api/c_api.h"

namespace eqxcallback {

// The examples that are not done yet. Keeps what their handlers may still read.
class Unfinished {
 public:
  // `api`: of XLA, which has to stay.
  explicit Unfinished(const XLA_FFI_Api* api) : api_(api) {}

  // `future`, which a handler made by `with_example_futures`, is one more to wait for. `kept` lives until all are done.
  void add(XLA_FFI_Future* future, std::shared_ptr<void> kept, const std::shared_ptr<Unfinished>& self);
  // There will be no more. The future of the call, or null if there is nothing to wait for: then `error` stays the
  // caller's.
  XLA_FFI_Future* close(XLA_FFI_Error* error);
  // One is done. Takes the error, if there is one.
  void done(XLA_FFI_Error* error);

 private:
  const XLA_FFI_Api* api_;
  std::mutex mutex_;
  size_t left_ = 1;  // one for the call itself
  bool is_needed_ = false;
  XLA_FFI_Error* error_ = nullptr;  // the first one
  XLA_FFI_Future* future_ = nullptr;
  std::vector<std::shared_ptr<void>> kept_;
};

// `api` with our functions of futures. Stays as long as the process, as `api` has to: handlers may use it at any time.
const XLA_FFI_Api* with_example_futures(const XLA_FFI_Api* api);

}  // namespace eqxcallback
