// Kernels of one example, as a user would write them: handlers and plain functions.
#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using F32 = ffi::Buffer<ffi::F32>;
using F32Result = ffi::ResultBuffer<ffi::F32>;

// out[i] = a * (x[0] + ... + x[i]) + w[i]: of many rows at once it would be something else. Refuses negative numbers.
extern "C" int cumulate(int64_t ndim, int64_t n, float a, const float* x, const float* w, float* out) {
  if (ndim != 1) return 2;
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (x[i] < 0) return 3;
    out[i] = a * (sum += x[i]) + w[i];
  }
  return 0;
}

static ffi::Error of_status(int status, float first) {
  if (status == 2) return ffi::Error::InvalidArgument("expected one axis");
  if (status == 3)
    return ffi::Error::InvalidArgument("expected numbers >= 0; the first one is " + std::to_string(first));
  return ffi::Error::Success();
}
static int call(F32 x, F32 w, F32Result out, double a) {
  return cumulate(static_cast<int64_t>(x.dimensions().size()), static_cast<int64_t>(x.element_count()),
                  static_cast<float>(a), x.typed_data(), w.typed_data(), out->typed_data());
}
static ffi::Error cumulate_native(F32 x, F32 w, F32Result out, double a) {
  return of_status(call(x, w, out, a), x.typed_data()[0]);
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(Cumulate, cumulate_native,
                              ffi::Ffi::Bind().Arg<F32>().Arg<F32>().Ret<F32>().Attr<double>("a"));

// Goes on after its call.
static ffi::Future cumulate_later(F32 x, F32 w, F32Result out, double a) {
  ffi::Promise promise;
  ffi::Future future(promise);
  std::thread([=]() mutable {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    const ffi::Error error = of_status(call(x, w, out, a), x.typed_data()[0]);
    error.success() ? promise.SetAvailable() : promise.SetError(error);
  }).detach();
  return future;
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(CumulateLater, cumulate_later,
                              ffi::Ffi::Bind().Arg<F32>().Arg<F32>().Ret<F32>().Attr<double>("a"));

static ffi::Error throws(F32 x, F32 w, F32Result out, double a) {
  if (call(x, w, out, a) != 0) throw std::domain_error("of a negative number");
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(Throws, throws, ffi::Ffi::Bind().Arg<F32>().Arg<F32>().Ret<F32>().Attr<double>("a"));

// The gradients of `cumulate` of one example.
extern "C" void cumulate_backward(int64_t n, float a, const float* dout, float* dx, float* dw) {
  float sum = 0;
  for (int64_t i = n - 1; i >= 0; --i) {
    sum += a * dout[i];
    if (dx != nullptr) dx[i] = sum;
    if (dw != nullptr) dw[i] = dout[i];
  }
}

// Waits until two threads are here at once, but for 20 s at most, unless it has to be `alone`. Which thread it is, how
// many there were, and whether it has Python's lock.
extern "C" void meet(const int32_t* alone, int64_t* out) {
  static std::atomic<int> here{0}, together{0};
  static std::atomic<int64_t> threads{0};
  thread_local const int64_t number = ++threads;
  const int now = ++here;
  if (now > 1) together = 2;
  const auto start = std::chrono::steady_clock::now();
  while (*alone == 0 && together < 2 && std::chrono::steady_clock::now() - start < std::chrono::seconds(20)) {
    std::this_thread::yield();
  }
  auto* has_lock = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  out[0] = number;
  out[1] = together;
  out[2] = has_lock == nullptr ? -1 : has_lock();
  --here;
}
