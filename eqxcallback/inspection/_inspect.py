"""Inspect a program: list its external calls, and what becomes of them."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.errors import JaxRuntimeError

from .. import xla
from ..core import quiet
from . import _captured, _copies
from ._calls import external_calls
from ._program import trace
from ._report import ExternalCall, Inspection
from ._runs import host_calls


# What programs are lowered for, in JAX's spelling.
_PLATFORMS = (*xla.PLATFORMS, "tpu")
_GPUS = ("cuda", "rocm")


def inspect(fn: Callable[..., Any], *args: Any, platform: str | None = None, runs: int = 0) -> Inspection:
    """The external calls of a program: where they are, which kernel runs, and what XLA makes of them. Nothing is run, unless
    `runs` says so.

    !!! example

        ```python
        print(eqxcallback.inspect(jax.jit(step, donate_argnums=0), cache, token))
        print(eqxcallback.inspect(step, cache, token, platform="cuda"))  # needs no GPU
        ```

    Calls whose results nobody uses are left out, as XLA leaves them out. So is what was ordinary JAX code from the start: the
    derivative of a reference in reverse mode, and, where it is differentiated, an op that no kernel takes and that has no kernel
    for gradients.

    **Arguments:**

    - `fn`: a function, a layer, or what `jax.jit` or `equinox.filter_jit` made of one. Others are jitted as
        `equinox.filter_jit` does, nothing being donated.
    - `args`: of a call: PyTrees of arrays or of `jax.ShapeDtypeStruct`s, Modules among them. What is not an array is static,
        unless `fn` is of `jax.jit`.
    - `platform`: `"cpu"`, `"cuda"`, `"rocm"` or `"tpu"`; by default the one in use. For that one the program is compiled, which
        shows what is copied and what is captured. So it is for `"cuda"` without a GPU where JAX's CUDA plugin is installed
        (`pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt` of JAX's version) with `ptxas` and `libdevice` of CUDA, and
        `JAX_PLATFORMS=cpu` is set: for an H200 that is described, not there. Otherwise it is only lowered, and `not_compiled`
        of the result says why.
    - `runs`: run it so many times, on copies of `args`, and count the kernels that the host calls each time: those that a GPU
        replays from a command buffer are none. XLA may record again, as when arrays have moved.

    **Returns:** an `Inspection`: `str` makes a table of it, and its `calls` are the rows.

    **Raises:** `TypeError` or `ValueError` for wrong arguments; what tracing, lowering and compiling raise.

    **Limitations:** copies are read from XLA's text, in which calls that are equal in everything cannot be told apart: they are
    matched in order. What is captured is read from XLA's plan. Whether the driver then accepts the capture only a run on a GPU
    shows, for which there is `runs`. Where calls are not captured, the
    program is compiled a second time to find out why.
    """
    if platform is not None and platform not in _PLATFORMS:
        raise ValueError(f"eqxcallback.inspect: expected platform to be one of {_PLATFORMS} or None; got {platform!r}.")
    with warnings.catch_warnings(), quiet():  # the table says what is not donated, and what could be faster
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        return _inspected(fn, args, platform, runs)


def _inspected(fn: Callable[..., Any], args: tuple[Any, ...], wanted: str | None, runs: int) -> Inspection:
    traced, options = trace(fn, args)
    in_use = xla.platform_in_use(jax.tree.leaves((fn, args)))
    platform = in_use if wanted is None else wanted
    donated = [info.donated for info in jax.tree.leaves(traced.args_info)]
    sites = xla.call_sites(traced.jaxpr, platform)
    calls = [call for site in sites for call in external_calls(site, traced.fun_name, platform, donated)]
    if platform == in_use:
        inspection = _compiled(traced, options, platform, calls)
        return dataclasses.replace(inspection, host_calls=host_calls(fn, args, runs))
    if runs:
        raise ValueError(f"eqxcallback.inspect: expected no runs for {platform}, which is not in use; got {runs}.")
    if any(call.lane == "jax callback" for call in calls):
        why = "JAX lowers its own callbacks for devices that are there only"
        return Inspection(traced.fun_name, platform, "traced", tuple(calls), not_compiled=why)
    lowered = traced.lower(lowering_platforms=(platform,))  # so that what cannot be lowered is an error here too
    return _elsewhere(traced, lowered, options, platform, calls)


def _compiled(traced: Any, options: Mapping[str, Any], platform: str, calls: list[ExternalCall]) -> Inspection:
    """Inspect a program compiled for the platform in use."""
    lowered = traced.lower()
    if platform in _GPUS:

        def compile(further: Mapping[str, Any]) -> xla.Compiled:
            return xla.compile_with_plan(lowered, {**options, **further})

        compiled = compile({})
        calls = _captured.resolved(_copies.resolved(calls, compiled.hlo_text), compiled, compile)
    else:
        calls = _copies.resolved(calls, str(lowered.compile(compiler_options=dict(options) or None).as_text()))
    return Inspection(traced.fun_name, platform, "compiled", tuple(calls))


def _elsewhere(
    traced: Any, lowered: Any, options: Mapping[str, Any], platform: str, calls: list[ExternalCall]
) -> Inspection:
    """Inspect a program for another platform: compiled, if a compiler for it is here."""

    def compile(further: Mapping[str, Any]) -> xla.Compiled:
        return xla.compile_deviceless(lowered, compiler_options={**options, **further})

    why = xla.deviceless_unavailable() if platform == "cuda" else f"there is no compiler for {platform} here"
    if why is None:
        try:
            compiled = compile({})
            calls = _captured.resolved(_copies.resolved(calls, compiled.hlo_text), compiled, compile)
            return Inspection(traced.fun_name, platform, "compiled", tuple(calls), device=compiled.device)
        except (JaxRuntimeError, xla.DevicelessError) as error:
            why = str(error).partition("\n")[0]
    return Inspection(traced.fun_name, platform, "lowered", tuple(calls), not_compiled=why)
