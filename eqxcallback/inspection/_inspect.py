"""Which external calls a program has, and what becomes of them."""

import warnings
from collections.abc import Callable
from typing import Any

import jax

from .. import xla
from . import _copies
from ._calls import external_call
from ._program import trace
from ._report import Inspection


# What programs are lowered for, in JAX's spelling.
_PLATFORMS = (*xla.PLATFORMS, "tpu")


def inspect(fn: Callable[..., Any], *args: Any, platform: str | None = None) -> Inspection:
    """The external calls of a program: where they are, which kernel runs, and what XLA makes of them. Nothing is run.

    !!! example

        ```python
        print(eqxcallback.inspect(jax.jit(step, donate_argnums=0), cache, token))
        print(eqxcallback.inspect(step, cache, token, platform="cuda"))  # needs no GPU
        ```

    Calls whose results nobody uses are left out, as XLA leaves them out. So is what was ordinary JAX code from the start: the
    derivative of a reference in reverse mode, and an op of [`eqxcallback.ops`][] on a dtype that its kernels do not take.

    **Arguments:**

    - `fn`: a function, a layer, or what `jax.jit` or `equinox.filter_jit` made of one. Others are jitted as
        `equinox.filter_jit` does, nothing being donated.
    - `args`: of a call: PyTrees of arrays or of `jax.ShapeDtypeStruct`s, Modules among them. What is not an array is static,
        unless `fn` is of `jax.jit`.
    - `platform`: `"cpu"`, `"cuda"`, `"rocm"` or `"tpu"`; by default the one in use. For that one the program is compiled, which
        shows what is copied. For others it is only lowered, which needs no device.

    **Returns:** an `Inspection`: `str` makes a table of it, and its `calls` are the rows.

    **Raises:** `TypeError` or `ValueError` for wrong arguments; what tracing, lowering and compiling raise.

    **Limitations:** copies are read from XLA's text, in which calls that are equal in everything cannot be told apart: they are
    matched in order. Whether a call is captured on a GPU is XLA's decision, and is not promised here.
    """
    if platform is not None and platform not in _PLATFORMS:
        raise ValueError(f"eqxcallback.inspect: expected platform to be one of {_PLATFORMS} or None; got {platform!r}.")
    traced = trace(fn, args)
    in_use = xla.platform_in_use(jax.tree.leaves((fn, args)))
    platform = in_use if platform is None else platform
    donated = [info.donated for info in jax.tree.leaves(traced.args_info)]
    sites = xla.call_sites(traced.jaxpr, platform)
    calls = [external_call(site, traced.fun_name, platform, donated) for site in sites]
    stage = "compiled" if platform == in_use else "lowered"
    with warnings.catch_warnings():  # the table says what is not donated
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        if stage == "compiled":
            calls = _copies.resolved(calls, str(traced.lower().compile().as_text()))
        elif any(call.lane == "jax callback" for call in calls):
            stage = "traced"  # JAX lowers its own callbacks for devices that are there only
        else:
            traced.lower(lowering_platforms=(platform,))  # so that what cannot be lowered is an error here too
    return Inspection(traced.fun_name, platform, stage, tuple(calls))
