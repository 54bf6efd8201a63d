"""`equinox.filter_jit` for programs that should run from command buffers."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import equinox as eqx
import jax

from .. import xla
from ..core import AnyInt, PyTree, integer


_WHO = "eqxcallback.jit_captured"
_DONATE = ("all", "all-except-first", "warn", "warn-except-first", "none")

# What equinox.filter_jit has in place of arguments of jax.jit.
_INSTEAD = {
    "static_argnums": "What is not an array is static already.",
    "static_argnames": "What is not an array is static already.",
    "donate_argnums": f"Use donate=, one of {_DONATE}.",
    "donate_argnames": f"Use donate=, one of {_DONATE}.",
    "in_shardings": "Use jax.device_put before the call, or equinox.filter_shard inside of it.",
    "out_shardings": "Use jax.device_put before the call, or equinox.filter_shard inside of it.",
}

# What XLA records by default, which there is no way to add to. Newer XLAs have one more, that older ones refuse.
# Noticed by: tests/deviceless/test_jit_captured.py.
_COMMANDS = (
    "FUSION",
    "CUBLAS",
    "CUBLASLT",
    "CUSTOM_CALL",
    "CUDNN",
    "CONDITIONAL",
    "DYNAMIC_SLICE_FUSION",
    *(("COLLECTIVES_KERNEL",) if jax.__version_info__ >= (0, 12) else ()),
)

# Passes of XLA that have the host compute where a slice at a loop's counter lies, which no graph can. The first is of JAX 0.10,
# the second of later ones. Noticed by: tests/deviceless/test_capture.py.
_SLICES_BY_HOST = ("fusion-dynamic-memcpy-rewriter", "dynamic-slice-annotator")

# What Equinox's `lower` returns, whose class it keeps private.
Lowered: TypeAlias = Any


class JitCaptured:
    """The function that [`eqxcallback.jit_captured`][] returns, called as the original. `lower` gives Equinox's `Lowered`.

    **Attributes:**

    - `compiler_options`: those of the program.
    - `plain`: the same without them.
    """

    compiler_options: Mapping[str, object]
    plain: Callable[..., PyTree]

    def __init__(
        self,
        fn: Callable[..., PyTree],
        compiler_options: Mapping[str, object],
        donate: str,
        jit_kwargs: Mapping[str, object],
    ):
        self.compiler_options = dict(compiler_options)
        filter_jit: Any = eqx.filter_jit  # its overloads do not have the arguments of jax.jit
        self.plain = filter_jit(fn, donate=donate, **jit_kwargs)
        self._captured: Any = filter_jit(fn, donate=donate, compiler_options=self.compiler_options, **jit_kwargs)
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        # Options are of whole programs: JAX refuses them inside of another, and under transformations.
        return (self._captured if xla.is_outermost() else self.plain)(*args, **kwargs)

    def lower(self, /, *args: PyTree, **kwargs: PyTree) -> Lowered:
        return self._captured.lower(*args, **kwargs)

    def __get__(self, instance: object, owner: object) -> Callable[..., PyTree]:
        return self if instance is None else eqx.Partial(self, instance)

    def __repr__(self) -> str:
        return f"jit_captured({getattr(self, '__name__', self.plain)})"


# A `JitCaptured`, or without `fn` a decorator that returns one. Overloads would repeat all of the options.
Captured: TypeAlias = Any


def jit_captured(
    fn: Callable[..., PyTree] | None = None,
    *,
    donate: str = "none",
    min_graph_size: AnyInt = 1,
    loops: bool = True,
    scans: bool = False,
    compiler_options: Mapping[str, object] | None = None,
    **jit_kwargs: object,
) -> Captured:
    """`equinox.filter_jit` with the options of XLA that make it record calls into command buffers, for this program alone.

    !!! example

        ```python
        @eqxcallback.jit_captured(donate="all-except-first")
        def decode(model, cache, token):
            ...
        ```

    By default XLA records only runs of at least five steps, so that a layer on its own stays outside, and no loops. The calls
    in it must be declared `command_buffer_compatible`; [`eqxcallback.inspect`][] tells which are recorded, and why not.

    **Arguments:**

    - `fn`: a function or a layer. Without it, a decorator is returned.
    - `donate`: as in `equinox.filter_jit`. Without donation XLA copies what a kernel overwrites.
    - `min_graph_size`: how many steps a run must have to be recorded.
    - `loops`: whether a loop that can be is recorded as a whole, instead of one iteration at a time.
    - `scans`: whether a `jax.lax.scan` with stacked inputs or results is such a loop. By default the host computes where their
        slices lie, which no graph can; with `scans` a kernel copies each slice. That costs little for the tokens of a
        decode loop, and much where a scan over layers reads stacked weights, which some calls can read where they lie.
    - `compiler_options`: further ones of `jax.jit`. They win over those of this function.
    - `jit_kwargs`: further arguments of `equinox.filter_jit`.

    **Returns:** a function as `equinox.filter_jit` makes it, with `lower`. On a CPU it is the same as that.

    **Raises:** `TypeError` or `ValueError` for wrong arguments; XLA's error, when it compiles, for options that it does not
    know.

    **Limitations:** inside of another `jax.jit`, or of a transformation, it is a plain `equinox.filter_jit`, as options belong
    to the whole program: put it outermost. Its list of what is recorded stands above `XLA_FLAGS`.
    """
    if donate not in _DONATE:
        raise ValueError(f"{_WHO}: expected donate to be one of {_DONATE}; got {donate!r}.")
    if not isinstance(loops, bool):
        raise TypeError(f"{_WHO}: expected loops to be True or False; got {loops!r} of type {type(loops).__name__}.")
    if not isinstance(scans, bool) or scans > loops:
        raise ValueError(f"{_WHO}: expected scans to be True only with loops, or False; got {scans!r}, loops={loops}.")
    if compiler_options is not None and not isinstance(compiler_options, Mapping):
        raise TypeError(
            f"{_WHO}: expected compiler_options to be a mapping, as jax.jit takes them; got {compiler_options!r} of type "
            f"{type(compiler_options).__name__}."
        )
    for name in jit_kwargs:
        if name in _INSTEAD:
            raise ValueError(
                f"{_WHO}: expected arguments of equinox.filter_jit; got {name}, of jax.jit alone. {_INSTEAD[name]}"
            )
    size = integer(
        _WHO,
        "min_graph_size to be an integer of at least 1",
        min_graph_size,
        least=1,
        remedy="For XLA's own use equinox.filter_jit.",
    )
    options: dict[str, object] = {"xla_gpu_graph_min_graph_size": size}
    if loops:
        options["xla_gpu_enable_command_buffer"] = ",".join((*_COMMANDS, "WHILE"))
    if scans:
        options["xla_disable_hlo_passes"] = ",".join(_SLICES_BY_HOST)
    options.update(compiler_options or {})

    def wrap(fn: Callable[..., PyTree]) -> JitCaptured:
        if not callable(fn):
            raise TypeError(f"{_WHO}: expected a function or a layer; got {fn!r} of type {type(fn).__name__}.")
        return JitCaptured(fn, options, donate, jit_kwargs)

    return wrap if fn is None else wrap(fn)
