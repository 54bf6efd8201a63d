"""The handlers of the extension, registered with XLA once, at import."""

import jax

from .. import _ext


# Names in the text of compiled programs, so they may not change between versions that share a cache.
PYTHON = "eqxcallback_python"
PYTHON_CAPTURED = "eqxcallback_python_captured"
PYTHON_EAGER = "eqxcallback_python_eager"

# The platforms, in JAX's spelling, that the python lane has handlers for.
PLATFORMS = ("cpu", "cuda")


def register() -> None:
    for name, handlers in _ext.python_call_targets().items():
        for platform, handler in handlers.items():
            jax.ffi.register_ffi_target(name, handler, platform=platform)
