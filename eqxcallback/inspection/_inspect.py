"""Inspect a program: list its external calls, and what becomes of them."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.errors import JaxRuntimeError

from .. import xla
from ..core import PyTree, Value, integer, quiet
from ..program import PLATFORMS
from . import _captured, _copies
from ._calls import external_calls
from ._program import Program, program_of
from ._report import ExternalCall, Inspection
from ._runs import check_runnable, host_calls, profile as profile_of


_GPUS = ("cuda", "rocm")


def inspect(
    fn: Callable[..., PyTree],
    *args: Value,
    platform: str | None = None,
    runs: int = 0,
    profile: bool = False,
    repeats: int = 10,
) -> Inspection:
    """The external calls of a program: where they are, which kernel runs, and what XLA makes of them. Nothing is run, unless
    `runs` or `profile` says so.

    !!! example

        ```python
        print(eqxcallback.inspect(jax.jit(step, donate_argnums=0), cache, token))
        print(eqxcallback.inspect(step, cache, token, platform="cuda"))  # needs no GPU
        eqxcallback.inspect(step, cache, token, profile=True).save("report.html")
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
    - `runs`: run it so many times, on copies of `args`, and count the kernels that the host calls each time: kernels that a GPU
        replays from a command buffer are not counted. XLA may record again, as when arrays have moved.
    - `profile`: on a CPU, run it and measure where the time goes: `profile` of the result has a row for each external call, and
        for the rest of the program, with time, bytes, operations, and how near that is to what the machine can do. The program
        really runs, effects among it, `1 + 2 * repeats` times: once to compile it, then without and with JAX's profiler.
        What it donates is copied each time.
    - `repeats`: how many runs times are medians of.

    **Returns:** an [`Inspection`][eqxcallback.inspection.Inspection]: `str` makes a table of it, its `calls` are the rows, and
    `save` writes it as a page of HTML.

    **Raises:** `TypeError` or `ValueError` for wrong arguments; what tracing, lowering and compiling raise.

    **Limitations:** copies are read from XLA's text, in which calls that are equal in everything cannot be told apart: they are
    matched in order. What is captured is read from XLA's plan. Whether the driver then accepts the capture only a run on a GPU
    shows, for which there is `runs`. Where calls are not captured, the
    program is compiled a second time to find out why. A profile is of XLA's thunks, which are its steps: what an op in the lanes
    `"jax"` or `"reference"` takes is in the rows of XLA's own code.
    """
    if platform is not None and platform not in PLATFORMS:
        raise ValueError(f"eqxcallback.inspect: expected platform to be one of {PLATFORMS} or None; got {platform!r}.")
    runs = integer("eqxcallback.inspect", "runs of 0 or more", runs, least=0)
    repeats = integer("eqxcallback.inspect", "repeats of 1 or more", repeats, least=1)
    with warnings.catch_warnings(), quiet():  # the table says what is not donated, and what could be faster
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        return _inspected(fn, args, platform, runs, repeats if profile else 0)


def _inspected(
    fn: Callable[..., PyTree], args: tuple[PyTree, ...], wanted: str | None, runs: int, repeats: int
) -> Inspection:
    """**Arguments:** `repeats` is 0 where no profile is wanted."""
    in_use = xla.platform_in_use(jax.tree.leaves((fn, args)))
    platform = in_use if wanted is None else wanted
    if repeats:
        check_runnable((fn, args), platform)
    program = program_of(fn, args)
    traced = program.traced
    donated = [info.donated for info in jax.tree.leaves(traced.args_info)]
    sites = xla.call_sites(traced.jaxpr, platform)
    pairs = [pair for site in sites for pair in external_calls(site, traced.fun_name, platform, donated)]
    calls = [call for call, _ in pairs]
    if platform == in_use:
        calls, text = _compiled(program, platform, calls)
        return Inspection(
            traced.fun_name,
            platform,
            "compiled",
            tuple(calls),
            host_calls=host_calls(fn, args, runs),
            profile=profile_of(program, calls, [site for _, site in pairs], text, repeats) if repeats else None,
        )
    if runs:
        raise ValueError(f"eqxcallback.inspect: expected no runs for {platform}, which is not in use; got {runs}.")
    if any(call.lane == "jax callback" for call in calls):
        why = "JAX lowers its own callbacks for devices that are there only"
        return Inspection(traced.fun_name, platform, "traced", tuple(calls), not_compiled=why)
    lowered = traced.lower(lowering_platforms=(platform,))  # so that what cannot be lowered is an error here too
    return _elsewhere(traced, lowered, program.options, platform, calls)


def _compiled(program: Program, platform: str, calls: list[ExternalCall]) -> tuple[list[ExternalCall], str]:
    """Compile a program for the platform in use: the calls with what that tells of them, and the compiled text."""
    lowered = program.traced.lower()
    if platform in _GPUS:

        def compile(further: Mapping[str, object]) -> xla.Compiled:
            return xla.compile_with_plan(lowered, {**program.options, **further})

        compiled = compile({})
        return _captured.resolved(_copies.resolved(calls, compiled.hlo_text), compiled, compile), compiled.hlo_text
    text = str(lowered.compile(compiler_options=dict(program.options) or None).as_text())
    return _copies.resolved(calls, text), text


def _elsewhere(
    traced: Any, lowered: Any, options: Mapping[str, object], platform: str, calls: list[ExternalCall]
) -> Inspection:
    """Inspect a program for another platform: compiled, if a compiler for it is here."""

    def compile(further: Mapping[str, object]) -> xla.Compiled:
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
