// Doubles x, and does one thing wrong, by the attribute `what`.
#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using F32 = ffi::Buffer<ffi::F32>;
using F32Result = ffi::ResultBuffer<ffi::F32>;

static void twice(const float* x, float* y, size_t size) {
  for (size_t i = 0; i < size; ++i) y[i] = 2 * x[i];
}

static ffi::Error harm(F32 x, F32Result out, std::string_view what, int64_t distance) {
  const size_t size = x.element_count();
  float* in = x.typed_data();
  volatile float* y = out->typed_data();
  volatile float sum = 0;
  twice(in, out->typed_data(), size);
  if (what == "write after") y[size - 1 + distance] = 1;
  if (what == "write before") y[-distance] = 1;
  if (what == "read after") sum = in[size - 1 + distance];
  if (what == "write input") in[0] = 7;
  if (what == "leave") return ffi::Error::Success();
  if (what == "abort") std::abort();
  if (what == "null") *reinterpret_cast<volatile int*>(8) = 1;
  if (what == "exit") std::exit(3);
  if (what == "throw") throw std::runtime_error("out of luck");
  if (what == "thread") std::thread([&] { twice(in, out->typed_data(), size); }).join();
  while (what == "loop") {
  }
  (void)sum;
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    Harm, harm, ffi::Ffi::Bind().Arg<F32>().Ret<F32>().Attr<std::string_view>("what").Attr<int64_t>("distance"));

// Writes all but the last element.
static ffi::Error leave_last(F32 x, F32Result out) {
  twice(x.typed_data(), out->typed_data(), x.element_count() - 1);
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(LeaveLast, leave_last, ffi::Ffi::Bind().Arg<F32>().Ret<F32>());

static ffi::Error right(F32 x, F32Result out) {
  twice(x.typed_data(), out->typed_data(), x.element_count());
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(Right, right, ffi::Ffi::Bind().Arg<F32>().Ret<F32>());

// A running sum in the memory of x, from the end, in which each element needs its neighbour as it was.
static ffi::Error neighbours(F32 x, F32Result out, bool is_right) {
  const auto size = static_cast<int64_t>(x.element_count());
  const float* in = x.typed_data();
  float* y = out->typed_data();
  if (is_right) {
    for (int64_t i = size - 1; i >= 0; --i) y[i] = in[i] + (i > 0 ? in[i - 1] : 0);
  } else {
    for (int64_t i = 0; i < size; ++i) y[i] = in[i] + (i > 0 ? in[i - 1] : 0);
  }
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(Neighbours, neighbours, ffi::Ffi::Bind().Arg<F32>().Ret<F32>().Attr<bool>("is_right"));

// On XLA's threads.
static ffi::Error pooled(ffi::ThreadPool pool, F32 x, F32Result out) {
  std::atomic<size_t> left{x.element_count()};
  for (size_t i = 0; i < x.element_count(); ++i) {
    pool.Schedule([&, i] {
      out->typed_data()[i] = 2 * x.typed_data()[i];
      --left;
    });
  }
  while (left > 0) std::this_thread::yield();
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(Pooled, pooled, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Ret<F32>());

static ffi::Error open_mp(F32 x, F32Result out) {
#pragma omp parallel for
  for (size_t i = 0; i < x.element_count(); ++i) out->typed_data()[i] = 2 * x.typed_data()[i];
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(OpenMp, open_mp, ffi::Ffi::Bind().Arg<F32>().Ret<F32>());

// Done when it returns, though it says so by a future.
static ffi::Future later(F32 x, F32Result out) {
  twice(x.typed_data(), out->typed_data(), x.element_count());
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetAvailable();
  return future;
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(Later, later, ffi::Ffi::Bind().Arg<F32>().Ret<F32>());

static ffi::Error refuse(F32, F32Result, std::string_view text, bool is_invalid) {
  return ffi::Error(is_invalid ? ffi::ErrorCode::kInvalidArgument : ffi::ErrorCode::kInternal, std::string(text));
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    Refuse, refuse, ffi::Ffi::Bind().Arg<F32>().Ret<F32>().Attr<std::string_view>("text").Attr<bool>("is_invalid"));

static ffi::Error latin1(F32, F32Result) { return ffi::Error::Internal("caf\xe9 is closed"); }
XLA_FFI_DEFINE_HANDLER_SYMBOL(Latin1, latin1, ffi::Ffi::Bind().Arg<F32>().Ret<F32>());

// Reads what it is given, by a name or not.
static ffi::Error all_attributes(F32 x, F32Result out, ffi::Dictionary attributes) {
  twice(x.typed_data(), out->typed_data(), x.element_count());
  return attributes.contains("a") ? ffi::Error::Success() : ffi::Error::Internal("no a");
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(AllAttributes, all_attributes, ffi::Ffi::Bind().Arg<F32>().Ret<F32>().Attrs());

// Plain C functions, which are not handlers.
extern "C" void Relu(const float* x, float* y, long n) {
  for (long i = 0; i < n; ++i) y[i] = x[i] > 0 ? x[i] : 0;
}
extern "C" void* Silent(void*) { return nullptr; }
extern "C" void Forever(void*) {
  for (volatile int i = 0;; i = i + 1) {
  }
}
extern "C" void Leaves(void*) { std::exit(4); }
extern "C" void Throws(void*) { throw std::runtime_error("no"); }
