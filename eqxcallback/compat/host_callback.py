"""A module to import in place of `jax.experimental.host_callback`, which JAX has no more.

Taps and calls keep the order of the program, as they did there. What differs: a `call` that fails raises from the program that
it is in, and in a program of several devices each device makes it, with the whole argument.
"""

import enum
from collections.abc import Callable

from .. import debug as _debug
from ..core import AnyBool, AnyInt, PyTree
from ..debug import CallbackException as CallbackException, Stream as _Stream


TapFunctionException = CallbackException
"""An older name of `CallbackException`."""


class CallbackFlavor(enum.Enum):
    """Accepted, and ignored."""

    IO_CALLBACK = 1
    PURE = 2
    DEBUG = 3


def id_tap(
    tap_func: Callable[..., object],
    arg: PyTree,
    *,
    result: PyTree = None,
    tap_with_device: AnyBool = False,
    device_index: AnyInt = 0,
    callback_flavor: CallbackFlavor = CallbackFlavor.IO_CALLBACK,
    **kwargs: object,
) -> PyTree:
    """The identity on `arg`, which calls `tap_func(arg, transforms)`, or `tap_func(arg, transforms, device=device)`.

    In a program that is split between devices, device `device_index` makes one call with the whole of `arg`; under `jax.pmap` and
    `jax.shard_map` each device calls.

    **Returns:** `arg`, or `result`.
    """
    del callback_flavor
    if kwargs:
        raise TypeError(
            "Support for **kwargs in ``id_tap`` has been removed. Instead, pre-apply keyword arguments, either by using a "
            "closure or by passing ``functools.partial(tap_func, **kwargs)``."
        )
    index = device_index or None
    return _debug.tap(tap_func, arg, result=result, with_device=tap_with_device, device_index=index, ordered=True)


def id_print(
    arg: PyTree,
    *,
    result: PyTree = None,
    tap_with_device: AnyBool = False,
    device_index: AnyInt = 0,
    output_stream: _Stream | None = None,
    threshold: int | None = None,
    callback_flavor: CallbackFlavor = CallbackFlavor.IO_CALLBACK,
    **kwargs: object,
) -> PyTree:
    """`id_tap` with a function that prints: `kwargs` first, in the order of their names, then `arg`."""
    del callback_flavor
    printer = _debug.Printer(kwargs, output_stream=output_stream, threshold=threshold)
    return id_tap(printer, arg, result=result, tap_with_device=tap_with_device, device_index=device_index)


def call(
    callback_func: Callable[..., object],
    arg: PyTree,
    *,
    result_shape: PyTree = None,
    call_with_device: AnyBool = False,
    device_index: AnyInt = 0,
    callback_flavor: CallbackFlavor = CallbackFlavor.IO_CALLBACK,
) -> PyTree:
    """The result of `callback_func(arg)`, or of `callback_func(arg, device=device)`, on the host."""
    del device_index, callback_flavor
    return _debug.call(callback_func, arg, result_shape=result_shape, with_device=call_with_device, ordered=True)


def barrier_wait(logging_name: str | None = None) -> None:
    """Wait until all callbacks of programs that were started have been called.

    **Raises:** `CallbackException` if some of them failed.
    """
    _debug.barrier_wait(logging_name)


def stop_outfeed_receiver() -> None:
    """Wait for all callbacks. What calls them starts again with the next one."""
    _debug.shutdown()
