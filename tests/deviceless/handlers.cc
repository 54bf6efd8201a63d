// Handlers for CUDA as a user would write them. Nothing runs them here: they are registered, and compiled into
// programs.
#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using F32 = ffi::Buffer<ffi::F32>;
using F32Result = ffi::ResultBuffer<ffi::F32>;

static ffi::Error launch(void*, F32, F32Result) { return ffi::Error::Success(); }

XLA_FFI_DEFINE_HANDLER_SYMBOL(Captured, launch,
                              ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().Arg<F32>().Ret<F32>(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(Plain, launch, ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().Arg<F32>().Ret<F32>());

// Called when a program is compiled, without a device.
static ffi::Error check(int64_t block) {
  if (block > 1024) return ffi::Error::InvalidArgument("block is too large");
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(Check, check, ffi::Ffi::BindInstantiate().Attr<int64_t>("block"));

static ffi::Error launch_checked(void*, F32, F32Result, int64_t) { return ffi::Error::Success(); }
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    LaunchChecked, launch_checked,
    ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().Arg<F32>().Ret<F32>().Attr<int64_t>("block"),
    {ffi::Traits::kCmdBufferCompatible});
