// Kernels of one example that rely on XLA's alignment of 64 bytes.
#include <chrono>
#include <cstdint>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using F32 = ffi::Buffer<ffi::F32>;
using F32Result = ffi::ResultBuffer<ffi::F32>;

static bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 64 == 0; }

extern "C" int twice(int64_t n, const float* x, float* out) {
  if (!is_aligned(x) || !is_aligned(out)) return 7;
  for (int64_t i = 0; i < n; ++i) out[i] = 2 * x[i];
  return 0;
}

extern "C" int add_first(int64_t n, const float* x, const float* w, float* out) {
  if (!is_aligned(x) || !is_aligned(w) || !is_aligned(out)) return 7;
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] + w[0];
  return 0;
}

extern "C" void write_after(int64_t n, const float* x, float* out) {
  for (int64_t i = 0; i <= n; ++i) out[i] = 2 * x[0];
}
extern "C" void write_before(int64_t n, const float* x, float* out) {
  for (int64_t i = -1; i < n; ++i) out[i] = 2 * x[0];
}

static ffi::Error call(F32 x, F32Result out) {
  const int status = twice(static_cast<int64_t>(x.element_count()), x.typed_data(), out->typed_data());
  return status == 0 ? ffi::Error::Success() : ffi::Error::InvalidArgument("expected memory of XLA's alignment");
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(Twice, call, ffi::Ffi::Bind().Arg<F32>().Ret<F32>());

// Goes on after its call.
static ffi::Future later(F32 x, F32Result out) {
  ffi::Promise promise;
  ffi::Future future(promise);
  std::thread([=]() mutable {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const ffi::Error error = call(x, out);
    error.success() ? promise.SetAvailable() : promise.SetError(error);
  }).detach();
  return future;
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(TwiceLater, later, ffi::Ffi::Bind().Arg<F32>().Ret<F32>());
