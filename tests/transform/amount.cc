// A library that is built several times, with another AMOUNT: out = x + AMOUNT.
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error add_amount(ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> out) {
  for (size_t i = 0; i < x.element_count(); ++i) out->typed_data()[i] = x.typed_data()[i] + AMOUNT;
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(AddAmount, add_amount,
                              ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());
