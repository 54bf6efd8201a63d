"""The handlers of the extension, registered with XLA once, at import."""

import ctypes
import threading

import jax

# jaxlib's table of handlers is not public. Its callback handler is the one way to tell XLA that a thread runs a host
# callback: see csrc/ffi/host_callback_scope.h. Without it, callbacks that run JAX on all devices at once deadlock.
# Noticed by: tests/xla/test_private_jax.py and tests/callback/test_threads.py.
from jaxlib import xla_client as _xla_client

from .. import _ext


# Names in the text of compiled programs, so they may not change between versions that share a cache.
PYTHON = "eqxcallback_python"
PYTHON_CAPTURED = "eqxcallback_python_captured"
PYTHON_EAGER = "eqxcallback_python_eager"

# The platforms, in JAX's spelling, that the python lane has handlers for.
PLATFORMS = ("cpu", "cuda")


_JAX_HANDLER = "xla_buffer_python_cpu_callback"


def jax_handler() -> object:
    """The capsule of jaxlib's own callback handler, or `None` if this version keeps it elsewhere."""
    return _xla_client.custom_call_targets("Host").get(_JAX_HANDLER, {}).get("execute")


def register() -> None:
    if (handler := jax_handler()) is not None:
        _ext.set_jax_handler(handler)
    for name, handlers in _ext.python_call_targets().items():
        for platform, handler in handlers.items():
            jax.ffi.register_ffi_target(name, handler, platform=platform)


_registered: set[tuple[str, str]] = set()
_lock = threading.Lock()


def register_handler(name: str, handler: object, platform: str) -> None:
    """Register the capsule of a handler under `name`, once."""
    with _lock:
        if (name, platform) in _registered:
            return
        # A backend that starts later would take the handler from a queue, and a handler that it refuses, built for a newer
        # XLA, would keep it from starting at all. One that is there refuses it here.
        jax.local_devices(backend=platform)
        jax.ffi.register_ffi_target(name, handler, platform=platform)
        _registered.add((name, platform))


def library_handler(path: str, symbol: str) -> object:
    """The capsule of the function `symbol` in the shared library at `path`. The library stays loaded."""
    return jax.ffi.pycapsule(getattr(ctypes.CDLL(path), symbol))
