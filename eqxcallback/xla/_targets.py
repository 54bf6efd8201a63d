"""The handlers of the extension, registered with XLA once, at import."""

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
