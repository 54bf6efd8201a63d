// The smallest native kernel there is: out = x + 1 for f32. What any callback is measured against.
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error add_one(ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> out) {
  for (size_t i = 0; i < x.element_count(); ++i) out->typed_data()[i] = x.typed_data()[i] + 1;
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(NativeAddOne, add_one,
                              ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());

// The same as a plain C function.
extern "C" void plain_add_one(int64_t n, const float* x, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] + 1;
}
