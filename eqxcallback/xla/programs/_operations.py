"""The operations of a function, as XLA counts them, with loops counted by their turns."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from ...core import Value
from ._walk import inner_jaxprs


class _UnknownError(Exception):
    """Nobody knows how often a loop runs, or what an external call does."""


def count_operations(function: Callable[..., object], operands: Sequence[Value]) -> float | None:
    """Count the operations of one call, but for exponentials and the like, which XLA counts apart.

    **Arguments:**

    - `operands`: anything with shapes and dtypes.

    **Returns:** how many, or `None` where a loop's turns depend on data, or where there are external calls.
    """
    structs = [jax.ShapeDtypeStruct(operand.shape, operand.dtype) for operand in operands]
    with jax.enable_x64(True):  # types are what they are, also where the rest of the program has no such
        try:
            return _all_turns(jax.make_jaxpr(function)(*structs))
        except _UnknownError:
            return None


def _all_turns(jaxpr: ClosedJaxpr) -> float:
    count = _one_turn(jaxpr)
    for body, length in _scans(jaxpr.jaxpr):
        count += length * _all_turns(body) - _one_turn(body)
    return count


def _one_turn(jaxpr: ClosedJaxpr) -> float:
    """XLA's count, which has one turn of each loop."""
    lowered = jax.jit(jaxpr_as_fun(jaxpr)).lower(
        *(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in jaxpr.in_avals)
    )
    analysis: Any = lowered.cost_analysis()
    if analysis is None or "stablehlo.custom_call" in lowered.as_text():
        raise _UnknownError
    return analysis.get("flops", 0.0)


def _scans(jaxpr: Jaxpr) -> Iterator[tuple[ClosedJaxpr, int]]:
    """The bodies of the outermost scans, and how often each runs."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn.params["jaxpr"], eqn.params["length"]
        else:
            for inner, times in inner_jaxprs(eqn):
                if times is None:
                    raise _UnknownError
                yield from _scans(inner)
