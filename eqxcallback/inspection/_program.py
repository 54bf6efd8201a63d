"""The function that is inspected, as a program of JAX's."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import numpy as np

from .. import xla
from ..program import JitCaptured


_FilterJit: Any = type(eqx.filter_jit(lambda: None))


def trace(fn: Any, args: tuple[Any, ...]) -> tuple[Any, Mapping[str, Any]]:
    """The `jax.stages.Traced` of `fn`, jitted if it is not, and compiler options that it does not have yet.

    As in Equinox, what is not an array is static.
    """
    if isinstance(fn, JitCaptured):
        return _trace(fn.plain, args), fn.compiler_options
    if isinstance(fn, eqx.Partial) and isinstance(fn.func, JitCaptured):  # a method
        return _trace(eqx.Partial(fn.func.plain, *fn.args, **fn.keywords), args), fn.func.compiler_options
    return _trace(fn, args), {}


def _trace(fn: Any, args: tuple[Any, ...]) -> Any:
    if not callable(fn):
        raise TypeError(
            f"eqxcallback.inspect: expected a function, a layer, or what jax.jit or eqx.filter_jit makes of one; got {fn!r} of "
            f"type {type(fn).__name__}."
        )
    if isinstance(fn, jax.stages.Wrapped):  # of jax.jit
        return fn.trace(*args)
    dynamic, static = eqx.partition((fn, args), _is_array)

    def program(fn: Any, *args: Any) -> Any:
        function, arguments = eqx.combine((fn, args), static)
        return eqx.filter(function(*arguments), eqx.is_array)

    program.__name__ = program.__qualname__ = _name_of(fn)
    traced = jax.jit(program).trace(dynamic[0], *dynamic[1])
    if not isinstance(fn.func if isinstance(fn, eqx.Partial) else fn, _FilterJit):
        return traced
    # The jitted function inside is the program: it knows what is donated.
    jitted, values = xla.only_jit(traced.jaxpr, jax.tree.leaves(dynamic))
    return jitted.trace(*values)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def is_filter_jit(fn: Any) -> bool:
    """True if `equinox.filter_jit` or `jit_captured` made it, of a method as well."""
    inner = fn.func if isinstance(fn, eqx.Partial) else fn
    return isinstance(inner, _FilterJit | JitCaptured)


def _name_of(fn: Any) -> str:
    while isinstance(fn, eqx.Partial):
        fn = fn.func
    if isinstance(fn, _FilterJit):
        fn = fn.__wrapped__
    return getattr(fn, "__name__", type(fn).__name__)
