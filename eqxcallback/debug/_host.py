"""Between buffers, which are lent for one call, and arrays on the host."""

import ctypes
import functools
from typing import Any

import jax
import numpy as np

from .. import _ext


def copy_to_host(ctx: _ext.ExecutionContext, buffer: _ext.Buffer) -> np.ndarray:
    """`buffer` as an array of its own. On a GPU this waits for XLA's stream."""
    if ctx.platform == "cpu":
        return np.array(buffer)
    array = np.empty(buffer.shape, buffer.dtype)
    if array.nbytes:
        stream = ctypes.c_void_p(ctx.stream)
        to, source = ctypes.c_void_p(array.ctypes.data), ctypes.c_uint64(buffer._address)
        driver = _driver()
        _check(driver.cuMemcpyDtoHAsync_v2(to, source, ctypes.c_size_t(array.nbytes), stream))
        _check(driver.cuStreamSynchronize(stream))
    return array


def copy_from_host(ctx: _ext.ExecutionContext, buffer: _ext.Buffer, array: np.ndarray) -> None:
    """Write `array`, of the same type, into an output."""
    if ctx.platform == "cpu":
        buffer.write(array)
    elif array.nbytes:
        array = np.ascontiguousarray(array)
        stream, size = ctypes.c_void_p(ctx.stream), ctypes.c_size_t(array.nbytes)
        driver = _driver()
        _check(
            driver.cuMemcpyHtoDAsync_v2(
                ctypes.c_uint64(buffer._address), ctypes.c_void_p(array.ctypes.data), size, stream
            )
        )
        _check(driver.cuStreamSynchronize(stream))


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"eqxcallback.debug: the CUDA driver could not copy a value (CUresult {code}).")


@functools.lru_cache(maxsize=128)
def device_of(platform: str, ordinal: int) -> Any:
    """The `jax.Device` of this process with that number."""
    return next(device for device in jax.local_devices(backend=platform) if device.local_hardware_id == ordinal)
