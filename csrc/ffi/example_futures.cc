// Futures of examples: our functions in place of XLA's, and the wait for all of them.
#include "ffi/example_futures.h"

#include <map>
#include <utility>

#include "ffi/created_error.h"

namespace eqxcallback {
namespace {

// An object that a handler takes for a future of XLA's. It goes when it is both done and waited for.
struct ExampleFuture {
  std::mutex mutex;
  bool is_done = false;
  XLA_FFI_Error* error = nullptr;
  std::shared_ptr<Unfinished> waiting;
};

ExampleFuture* ours(XLA_FFI_Future* future) { return reinterpret_cast<ExampleFuture*>(future); }

XLA_FFI_Error* create(XLA_FFI_Future_Create_Args* args) {
  args->future = reinterpret_cast<XLA_FFI_Future*>(new ExampleFuture());
  return nullptr;
}

void complete(ExampleFuture* future, XLA_FFI_Error* error) {
  std::shared_ptr<Unfinished> waiting;
  {
    const std::lock_guard lock(future->mutex);
    future->is_done = true;
    future->error = error;
    waiting = future->waiting;
  }
  if (waiting == nullptr) return;
  delete future;
  waiting->done(error);
}

XLA_FFI_Error* set_available(XLA_FFI_Future_SetAvailable_Args* args) {
  complete(ours(args->future), nullptr);
  return nullptr;
}

XLA_FFI_Error* set_error(XLA_FFI_Future_SetError_Args* args) {
  complete(ours(args->future), args->error);
  return nullptr;
}

}  // namespace

void Unfinished::add(XLA_FFI_Future* future, std::shared_ptr<void> kept, const std::shared_ptr<Unfinished>& self) {
  {
    const std::lock_guard lock(mutex_);
    kept_.push_back(std::move(kept));
    ++left_;
    is_needed_ = true;
  }
  ExampleFuture* example = ours(future);
  {
    const std::lock_guard lock(example->mutex);
    if (!example->is_done) {
      example->waiting = self;
      return;
    }
  }
  XLA_FFI_Error* error = example->error;
  delete example;
  done(error);
}

XLA_FFI_Future* Unfinished::close(XLA_FFI_Error* error) {
  {
    const std::lock_guard lock(mutex_);
    if (!is_needed_) return nullptr;
  }
  XLA_FFI_Future_Create_Args args{XLA_FFI_Future_Create_Args_STRUCT_SIZE, nullptr, nullptr};
  if (XLA_FFI_Error* failed = api_->XLA_FFI_Future_Create(&args)) destroy_error(api_, failed);
  // Only this thread reads it before the call's own count is given back.
  future_ = args.future;
  XLA_FFI_Future* future = future_;
  done(error);
  return future;
}

void Unfinished::done(XLA_FFI_Error* error) {
  {
    const std::lock_guard lock(mutex_);
    if (error != nullptr && error_ == nullptr) {
      error_ = error;
    } else if (error != nullptr) {
      destroy_error(api_, error);
    }
    if (--left_ > 0) return;
  }
  // All examples are done, so no other thread is here any more.
  kept_.clear();  // which may copy results to their places
  XLA_FFI_Error* failed = nullptr;
  if (error_ != nullptr) {
    XLA_FFI_Future_SetError_Args args{XLA_FFI_Future_SetError_Args_STRUCT_SIZE, nullptr, future_, error_};
    failed = api_->XLA_FFI_Future_SetError(&args);
  } else {
    XLA_FFI_Future_SetAvailable_Args args{XLA_FFI_Future_SetAvailable_Args_STRUCT_SIZE, nullptr, future_};
    failed = api_->XLA_FFI_Future_SetAvailable(&args);
  }
  if (failed != nullptr) destroy_error(api_, failed);
}

const XLA_FFI_Api* with_example_futures(const XLA_FFI_Api* api) {
  static std::mutex mutex;
  static auto* copies = new std::map<const XLA_FFI_Api*, std::unique_ptr<StructCopy<XLA_FFI_Api>>>();
  const std::lock_guard lock(mutex);
  std::unique_ptr<StructCopy<XLA_FFI_Api>>& copy = (*copies)[api];
  if (copy == nullptr) {
    copy = std::make_unique<StructCopy<XLA_FFI_Api>>(*api);
    (*copy)->XLA_FFI_Future_Create = create;
    (*copy)->XLA_FFI_Future_SetAvailable = set_available;
    (*copy)->XLA_FFI_Future_SetError = set_error;
  }
  return copy->get();
}

}  // namespace eqxcallback
