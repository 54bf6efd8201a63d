"""The function that is inspected, as a program of JAX's."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np

from .. import xla
from ..core import PyTree, Value
from ..program import JitCaptured


_FilterJit: Any = type(eqx.filter_jit(lambda: None))


@dataclasses.dataclass(frozen=True)
class Program:
    """**Attributes:**

    - `jitted`, `args`: what runs it, of `jax.jit`, and the arguments of that.
    - `traced`: the `jax.stages.Traced` of the two.
    - `options`: compiler options that it does not have yet.
    """

    jitted: Any
    args: Sequence[Value]
    traced: Any
    options: Mapping[str, Any]


def program_of(fn: Any, args: tuple[PyTree, ...]) -> Program:
    """The program of a call of `fn`, jitted if it is not.

    As in Equinox, what is not an array is static.
    """
    if isinstance(fn, JitCaptured):
        return _program(fn.plain, args, fn.compiler_options)
    if isinstance(fn, eqx.Partial) and isinstance(fn.func, JitCaptured):  # a method
        return _program(eqx.Partial(fn.func.plain, *fn.args, **fn.keywords), args, fn.func.compiler_options)
    return _program(fn, args, {})


def _program(fn: Any, args: tuple[PyTree, ...], options: Mapping[str, Any]) -> Program:
    if not callable(fn):
        raise TypeError(
            f"eqxcallback.inspect: expected a function, a layer, or what jax.jit or eqx.filter_jit makes of one; got {fn!r} of "
            f"type {type(fn).__name__}."
        )
    if isinstance(fn, jax.stages.Wrapped):  # of jax.jit
        return Program(fn, args, fn.trace(*args), options)
    dynamic, static = eqx.partition((fn, args), _is_array)

    def program(fn: Any, *args: Value) -> Any:
        function, arguments = eqx.combine((fn, args), static)
        return eqx.filter(function(*arguments), eqx.is_array)

    program.__name__ = program.__qualname__ = _name_of(fn)
    jitted, values = jax.jit(program), (dynamic[0], *dynamic[1])
    traced = jitted.trace(*values)
    if isinstance(fn.func if isinstance(fn, eqx.Partial) else fn, _FilterJit):
        # The jitted function inside is the program: it knows what is donated.
        jitted, values = xla.only_jit(traced.jaxpr, jax.tree.leaves(dynamic))
        traced = jitted.trace(*values)
    return Program(jitted, values, traced, options)


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def is_filter_jit(fn: object) -> bool:
    """True if `equinox.filter_jit` or `jit_captured` made it, of a method as well."""
    inner = fn.func if isinstance(fn, eqx.Partial) else fn
    return isinstance(inner, _FilterJit | JitCaptured)


def _name_of(fn: Any) -> str:
    while isinstance(fn, eqx.Partial):
        fn = fn.func
    if isinstance(fn, _FilterJit):
        fn = fn.__wrapped__
    return getattr(fn, "__name__", type(fn).__name__)
