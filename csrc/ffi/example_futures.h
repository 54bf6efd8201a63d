// Futures of handlers that go on after their call: XLA sees one future for all examples. XLA's API makes futures and
// completes them, and has no function that waits for one, so handlers that are called for examples get functions of
// ours in its place.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "ffi/struct_copy.h"
#include "xla/ffi/api/c_api.h"

namespace eqxcallback {

// The examples that are not yet done. Keeps what their handlers may still read.
class Unfinished {
 public:
  // `api`: XLA's API, which has to outlive this.
  explicit Unfinished(const XLA_FFI_Api* api) : api_(api) {}

  // Adds a future to wait for, which a handler made by `with_example_futures`. `kept` lives until all futures are done.
  void add(XLA_FFI_Future* future, std::shared_ptr<void> kept, const std::shared_ptr<Unfinished>& self);
  // Says that no more futures come. Returns the future of the call, or null if there is nothing to wait for: then the
  // caller keeps `error`.
  XLA_FFI_Future* close(XLA_FFI_Error* error);
  // Says that one future is done. Takes its error, if there is one.
  void done(XLA_FFI_Error* error);

 private:
  const XLA_FFI_Api* api_;
  std::mutex mutex_;
  size_t left_ = 1;  // one count is the call's own
  bool is_needed_ = false;
  XLA_FFI_Error* error_ = nullptr;  // the first error
  XLA_FFI_Future* future_ = nullptr;
  std::vector<std::shared_ptr<void>> kept_;
};

// Returns `api` with our functions for futures. It lives as long as the process, as `api` has to: handlers may use it
// at any time.
const XLA_FFI_Api* with_example_futures(const XLA_FFI_Api* api);

}  // namespace eqxcallback
