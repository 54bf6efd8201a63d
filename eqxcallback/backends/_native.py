"""The native lane: handlers of our extension, and of the user's shared libraries."""

import os

from .. import xla
from ..kernel import NativeKernel
from ._bound_kernel import BoundKernel
from ._host_compiler import built
from ._library import function_of


def prepare(bound: BoundKernel, kernel: NativeKernel, platform: str, who: str) -> xla.LaunchLowering:
    is_own = kernel.library is None and kernel.source is None
    target = _own_target(kernel.symbol, platform, f"{who}[native]") if is_own else library_target(kernel, platform, who)
    attributes = xla.attributes(bound.options, f"{who}[native]")
    return xla.LaunchLowering(target, attributes, bound.call, on_threads=platform == "cpu")


def _own_target(symbol: str, platform: str, who: str) -> str:
    if platform != "cpu" or symbol not in xla.CPU_OPS:
        raise ValueError(
            f"{who}: expected a symbol of this package for {platform}; got {symbol!r}. There are {', '.join(xla.CPU_OPS)} for "
            "cpu; pass library=PATH for one of yours."
        )
    return xla.CPU_OPS[symbol]


def library_target(kernel: NativeKernel, platform: str, op: str) -> str:
    who = f"{op}[native]"
    path = os.fspath(kernel.library or built(kernel.source or "", kernel.options, who, is_handler=True))
    remedy = f'Export it, with XLA_FFI_DEFINE_HANDLER_SYMBOL({kernel.symbol}, ...) or extern "C".'
    function = function_of(path, kernel.symbol, who, remedy)
    if (refusal := function.refusal()) is not None:
        raise ValueError(
            f"{who}: expected an XLA FFI handler; got the function {kernel.symbol!r} of {path}, which {refusal} when it was "
            f"asked what XLA asks handlers. Define one around it with XLA_FFI_DEFINE_HANDLER_SYMBOL({kernel.symbol}, ...), or "
            "pass it as a CKernel."
        )
    # The name stands in compiled programs, which may outlive this process: it says what the code is, not where it lies.
    target = f"eqxcallback_{kernel.symbol}_{function.digest}"
    try:
        function.register(target, platform, op)
    except Exception as error:
        raise ValueError(
            f"{who}: XLA refuses the handler {kernel.symbol!r} of {path} ({error}). Build it with the headers of the oldest "
            "JAX that it should run on: jax.ffi.include_dir()."
        ) from error
    return target
