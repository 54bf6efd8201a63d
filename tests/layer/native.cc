// The forward and backward kernels of `Wave` in C++: out = sin(x) * w^power. Either operand may lack the leading axes
// of out.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using F32 = ffi::Buffer<ffi::F32>;
using F32Result = ffi::ResultBuffer<ffi::F32>;

static float raised(float base, int64_t power) {
  float result = 1;
  for (int64_t i = 0; i < power; ++i) result *= base;
  return result;
}

static ffi::Error wave(F32 w, F32 x, F32Result out, int64_t power) {
  for (size_t i = 0; i < out->element_count(); ++i) {
    out->typed_data()[i] =
        std::sin(x.typed_data()[i % x.element_count()]) * raised(w.typed_data()[i % w.element_count()], power);
  }
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(Wave, wave, ffi::Ffi::Bind().Arg<F32>().Arg<F32>().Ret<F32>().Attr<int64_t>("power"));

// A gradient without the leading axes is the sum over them.
static ffi::Error wave_backward(F32 w, F32 x, F32, F32 cotangent, F32Result dw, F32Result dx, int64_t power) {
  std::memset(dw->untyped_data(), 0, dw->size_bytes());
  std::memset(dx->untyped_data(), 0, dx->size_bytes());
  for (size_t i = 0; i < cotangent.element_count(); ++i) {
    const float a = w.typed_data()[i % w.element_count()], b = x.typed_data()[i % x.element_count()];
    const float g = cotangent.typed_data()[i];
    dw->typed_data()[i % dw->element_count()] += g * std::sin(b) * static_cast<float>(power) * raised(a, power - 1);
    dx->typed_data()[i % dx->element_count()] += g * std::cos(b) * raised(a, power);
  }
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    WaveBackward, wave_backward,
    ffi::Ffi::Bind().Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>().Ret<F32>().Ret<F32>().Attr<int64_t>("power"));

// Its results are the gradients whose bits are set.
static ffi::Error wave_backward_needed(F32 w, F32 x, F32, F32 cotangent, ffi::RemainingRets rets, int64_t power,
                                       int64_t needs_grad) {
  std::vector<float> unneeded(std::max(w.element_count(), x.element_count()));
  float* gradients[] = {unneeded.data(), unneeded.data()};
  size_t result = 0;
  for (int64_t operand = 0; operand < 2; ++operand) {
    if ((needs_grad >> operand & 1) == 0) continue;
    auto buffer = rets.get<F32>(result++);
    if (buffer.has_error()) return buffer.error();
    std::memset((*buffer)->untyped_data(), 0, (*buffer)->size_bytes());
    gradients[operand] = (*buffer)->typed_data();
  }
  if (result != rets.size()) return ffi::Error::InvalidArgument("more results than gradients that are needed");
  for (size_t i = 0; i < cotangent.element_count(); ++i) {
    const size_t row = i % w.element_count(), column = i % x.element_count();
    const float a = w.typed_data()[row], b = x.typed_data()[column], g = cotangent.typed_data()[i];
    gradients[0][row] += g * std::sin(b) * static_cast<float>(power) * raised(a, power - 1);
    gradients[1][column] += g * std::cos(b) * raised(a, power);
  }
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    WaveBackwardNeeded, wave_backward_needed,
    ffi::Ffi::Bind().Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>().RemainingRets().Attr<int64_t>("power").Attr<int64_t>(
        "needs_grad"));
