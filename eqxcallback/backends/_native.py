"""The native lane: handlers of our extension, and of the user's shared libraries."""

import functools
import hashlib
import os
import pathlib

from .. import xla
from ..kernel import Kernel, NativeKernel
from ._bound_kernel import BoundKernel


def prepare(bound: BoundKernel, kernel: NativeKernel, platform: str, who: str) -> xla.LaunchLowering:
    if kernel.library is None:
        target = _own_target(kernel.symbol, platform, f"{who}[native]")
    else:
        target = _library_target(kernel, platform, who)
    return xla.LaunchLowering(target, xla.attributes(bound.options, f"{who}[native]"), bound.call)


def register_library(kernel: Kernel, platform: str, who: str) -> None:
    """What `prepare` does for a program, before there is one. Other kernels have nothing to register."""
    if isinstance(kernel, NativeKernel) and kernel.library is not None:
        _library_target(kernel, platform, who)


def _own_target(symbol: str, platform: str, who: str) -> str:
    if platform != "cpu" or symbol not in xla.CPU_OPS:
        raise ValueError(
            f"{who}: expected a symbol of this package for {platform}; got {symbol!r}. There are {', '.join(xla.CPU_OPS)} for "
            "cpu; pass library=PATH for one of yours."
        )
    return xla.CPU_OPS[symbol]


def _library_target(kernel: NativeKernel, platform: str, op: str) -> str:
    who = f"{op}[native]"
    path = os.fspath(kernel.library or "")
    try:
        status = os.stat(path)
        digest = _digest(path, (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino))
        function = xla.library_function(path, digest, kernel.symbol)
    except OSError as error:
        raise ValueError(
            f"{who}: the library {path} cannot be loaded ({error}). Build it, or correct the path."
        ) from None
    except AttributeError:
        raise ValueError(
            f"{who}: the library {path} has no symbol {kernel.symbol!r}. Export it, with "
            f'XLA_FFI_DEFINE_HANDLER_SYMBOL({kernel.symbol}, ...) or extern "C".'
        ) from None
    if (refusal := function.refusal()) is not None:
        raise ValueError(
            f"{who}: expected an XLA FFI handler; got the function {kernel.symbol!r} of {path}, which {refusal} when it was "
            f"asked what XLA asks handlers. Define one around it with XLA_FFI_DEFINE_HANDLER_SYMBOL({kernel.symbol}, ...)."
        )
    # The name stands in compiled programs, which may outlive this process: it says what the code is, not where it lies.
    target = f"eqxcallback_{kernel.symbol}_{digest}"
    try:
        function.register(target, platform, op)
    except Exception as error:
        raise ValueError(
            f"{who}: XLA refuses the handler {kernel.symbol!r} of {path} ({error}). Build it with the headers of the oldest "
            "JAX that it shall run on: jax.ffi.include_dir()."
        ) from error
    return target


@functools.lru_cache(maxsize=256)
def _digest(path: str, version: tuple[int, ...]) -> str:
    del version  # a rebuilt library is another one
    return hashlib.blake2b(pathlib.Path(path).read_bytes(), digest_size=8).hexdigest()
