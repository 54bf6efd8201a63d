"""Effects in the condition of a loop."""

from collections.abc import Sequence
from typing import Any

import jax

# `jax._src.lax.control_flow.loops._while_lowering`: JAX's rule, before which ours stands.
# Noticed by: tests/xla/test_private_jax.py and tests/debug/test_tap_loops.py.
from jax._src.lax.control_flow.loops import _while_lowering
from jax.extend.core import jaxpr_as_fun
from jax.extend.core.primitives import while_p
from jax.interpreters import mlir

from ...core import Aval, Value
from ..types import kernel_effect, ordered_kernel_effect


def _lower(ctx: mlir.LoweringRuleContext, *operands: Value, cond_jaxpr: Any, body_jaxpr: Any, **params: Any) -> Any:
    """JAX's rule, but for conditions with an effect of ours: each turn of the loop computes the next one's condition.

    XLA knows how often some loops turn, and drops their condition, with its effects. Under `vmap`, where examples end at
    different times, JAX computes the condition once more in the body, to keep the examples that are at their end: an effect
    happens twice. And if it is ordered, JAX keeps none of them.
    """
    if not {kernel_effect, ordered_kernel_effect} & set(cond_jaxpr.effects):
        return _while_lowering(ctx, *operands, cond_jaxpr=cond_jaxpr, body_jaxpr=body_jaxpr, **params)
    condition, body = jaxpr_as_fun(cond_jaxpr), jaxpr_as_fun(body_jaxpr)
    of_condition, of_both = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

    def loop(*args: Value) -> Sequence[Value]:
        def goes_on(carry: Sequence[Value]) -> Any:
            return condition(*args[:of_condition], *carry)[0]

        def turn(state: tuple[Any, Sequence[Any]]) -> tuple[Any, Sequence[Any]]:
            going, before = state
            after = body(*args[of_condition:of_both], *before)
            carry = [_of_going(going, *pair) for pair in zip(after, before, strict=True)] if going.ndim else after
            return goes_on(carry), carry

        carry = list(args[of_both:])
        return jax.lax.while_loop(lambda state: state[0].any(), turn, (goes_on(carry), carry))[1]

    return mlir.lower_fun(loop, multiple_results=True)(ctx, *operands)


def _of_going(going: Any, after: Any, before: Any) -> Any:
    """`after` of the examples that go on, and `before` of others. Both have the axes of `going` in front."""
    aval: Aval = jax.typeof(after)
    on_mesh = {} if aval.sharding.mesh.empty else {"out_sharding": aval.sharding}
    return jax.lax.select(jax.lax.broadcast_in_dim(going, after.shape, range(going.ndim), **on_mesh), after, before)


def register() -> None:
    mlir.register_lowering(while_p, _lower)
