"""The handlers of the extension, registered with XLA at import, and what else is registered later."""

import atexit
import functools
import os
import platform as host
import threading
from collections.abc import Sequence
from typing import Any

import jax

# jaxlib's table of handlers is not public. Its callback handler is the one way to tell XLA that a thread runs a host
# callback: see csrc/ffi/host_callback_scope.h. Without it, callbacks that run JAX on all devices at once deadlock.
# Noticed by: tests/xla/test_private_jax.py and tests/callback/test_threads.py.
from jaxlib import xla_client as _xla_client

from ... import _ext


# Names in the text of compiled programs, so they may not change between versions that share a cache.
PYTHON = "eqxcallback_python"
PYTHON_CAPTURED = "eqxcallback_python_captured"
PYTHON_EAGER = "eqxcallback_python_eager"

LAUNCH = "eqxcallback_launch"
LAUNCH_CAPTURED = "eqxcallback_launch_captured"

# The platforms, in JAX's spelling, that the python lane has handlers for.
PYTHON_PLATFORMS = ("cpu", "cuda")


# The targets of this package's kernels, by symbol.
CPU_OPS = {symbol: f"eqxcallback_{symbol}" for symbol in _ext.cpu_ops()}

# The end of the name of a target that calls another one for each example of a batch.
FOR_EACH = "_examples"

_JAX_HANDLER = "xla_buffer_python_cpu_callback"


def jax_handler() -> object:
    """The capsule of jaxlib's own callback handler, or `None` if this version keeps it elsewhere."""
    return _xla_client.custom_call_targets("Host").get(_JAX_HANDLER, {}).get("execute")


def register() -> None:
    # What is registered later runs before: the wait for programs with effects, which debug/_barrier.py does.
    atexit.register(_ext.end_visits)
    if (handler := jax_handler()) is not None:
        _ext.set_jax_handler(handler)
    for name, handlers in _ext.python_call_targets().items():
        for platform, handler in handlers.items():
            jax.ffi.register_ffi_target(name, handler, platform=platform)
    _register_launch("CUDA")
    for symbol, (of_one, for_each) in _ext.cpu_ops().items():
        jax.ffi.register_ffi_target(CPU_OPS[symbol], of_one, platform="cpu")
        jax.ffi.register_ffi_target(CPU_OPS[symbol] + FOR_EACH, for_each, platform="cpu")


def _register_launch(platform: str) -> None:
    # The type of a handler's state goes first. JAX's CPU backend takes what was registered before it started in the wrong
    # order, and does not start: there it has to be running.
    state: Any = _ext.gpu_launch_type()
    jax.ffi.register_ffi_type("eqxcallback_launch", state, platform=platform)
    for name, handlers in _ext.gpu_launch_targets().items():
        jax.ffi.register_ffi_target(name, handlers[platform], platform=platform)


_launch_platforms = ["cuda"]


def launch_platforms() -> Sequence[str]:
    """Return the platforms on which our launcher launches kernels."""
    return _launch_platforms


def launch_with(driver: str) -> None:
    """Launch with the library at `driver` in place of CUDA's own, on the platform `cpu` as well: for tests."""
    _ext.set_gpu_driver(driver)
    if "cpu" not in _launch_platforms:
        jax.local_devices(backend="cpu")
        _register_launch("cpu")
        _launch_platforms.append("cpu")


def compute_capabilities() -> Sequence[int]:
    """Return the compute capabilities of the CUDA devices that this process has: 90 is 9.0."""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:  # there are none
        return []
    return [int(str(device.compute_capability).replace(".", "")) for device in devices]


def device_text(platform: str) -> str | None:
    """A text for the devices of `platform` that this process has, the same for others like them. `None` where there are none, or
    not all are alike.
    """
    try:
        kinds = {device.device_kind for device in jax.local_devices(backend=platform)}
    except RuntimeError:
        return None
    if len(kinds) > 1:
        return None
    return f"{_processor()}, {os.cpu_count()} threads" if platform == "cpu" else kinds.pop()


@functools.cache
def _processor() -> str:
    """JAX calls all of them "cpu"."""
    try:
        with open("/proc/cpuinfo") as lines:
            name = next(line for line in lines if line.startswith("model name")).partition(":")[2].strip()
    except (OSError, StopIteration):
        name = host.processor() or host.machine()
    return f"{name} ({_ext.isa()})"


def host_calls() -> int:
    """Count the calls so far of kernels in Python and in our launcher. A GPU's replays are not counted."""
    return _ext.host_calls()


def target_names() -> list[str]:
    """Return the names of all handlers that programs may call by now."""
    return [
        *_ext.python_call_targets(),
        LAUNCH,
        LAUNCH_CAPTURED,
        *(target + end for target in CPU_OPS.values() for end in ("", FOR_EACH)),
        *sorted({name for name, _ in _registered}),
    ]


def is_registered(target: str, platform: str) -> bool:
    """True if programs for `platform`, in JAX's spelling, may call `target`."""
    if target.removesuffix(FOR_EACH) in CPU_OPS.values():
        return platform == "cpu"
    if target in (LAUNCH, LAUNCH_CAPTURED):
        return platform in _launch_platforms
    if target in _ext.python_call_targets():
        return platform in PYTHON_PLATFORMS
    return (target, platform) in _registered


_registered: set[tuple[str, str]] = set()
_lock = threading.Lock()


def register_handler(name: str, handler: object, platform: str) -> None:
    """Register the capsule of a handler under `name`, once."""
    with _lock:
        if (name, platform) in _registered:
            return
        if platform == "cpu":
            # A backend that starts later would take the handler from a queue, and a handler that it refuses, built for a
            # newer XLA, would keep it from starting at all. One that is there refuses it here.
            jax.local_devices(backend=platform)
        # XLA's spelling: of another one, nobody would ask for the handler.
        in_xla = {"cuda": "CUDA", "rocm": "ROCM"}.get(platform, platform)
        jax.ffi.register_ffi_target(name, handler, platform=in_xla)
        _registered.add((name, platform))
