"""Jaxprs without the calls that a transformation has no rule for."""

from collections.abc import Collection, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal

from ...core import Value


def evaluate_without(calls: Collection[str], closed: ClosedJaxpr, args: Sequence[Value]) -> Sequence[Any]:
    """Evaluate a jaxpr without the primitives named `calls`, which call another jaxpr each, but for what they compute."""
    jaxpr = closed.jaxpr
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        called = [param for param in eqn.params.values() if isinstance(param, ClosedJaxpr)]
        if eqn.primitive.name in calls and len(called) == 1:
            outs = evaluate_without(calls, called[0], operands)
        else:
            out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
            outs = out if eqn.primitive.multiple_results else [out]
        values.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]
