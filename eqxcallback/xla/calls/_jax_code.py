"""JAX functions in the place of kernels, which see plain arrays: those of one device, outside of any `shard_map`."""

from collections.abc import Sequence
from typing import Any

# `jax._src.config._check_vma`: a `shard_map` around the call asks calls in it, `pallas_call` for one, over which axes their
# results vary. What we bind says it for them, and there is no public way to end the question.
# Noticed by: tests/transform/test_jax_kernel.py.
from jax._src import config as _config
from jax.extend.core import Primitive
from jax.interpreters import mlir

from ...core import Aval, Value
from ..handles import JaxLowering
from ..types import no_mesh, on_current_mesh, result_aval


_jax_code_p = Primitive("jax_code")
_jax_code_p.multiple_results = True


def jax_code(lowering: JaxLowering, args: Sequence[Value], result_avals: Sequence[Aval]) -> Sequence[Value]:
    return _jax_code_p.bind(*args, lowering=lowering, result_avals=tuple(result_avals))


@_jax_code_p.def_abstract_eval
def _abstract_eval(*avals: Aval, lowering: JaxLowering, result_avals: Sequence[Aval]) -> Sequence[Aval]:
    del lowering
    return on_current_mesh(result_avals, avals)


def _lower(
    ctx: mlir.LoweringRuleContext, *operands: Value, lowering: JaxLowering, result_avals: Sequence[Aval]
) -> Sequence[Value]:
    def function(*args: Value) -> Sequence[Value]:
        return lowering.function(args, result_avals)

    avals: list[Any] = list(ctx.avals_in)
    plain = ctx.replace(avals_in=[result_aval(aval.shape, aval.dtype) for aval in avals])
    with no_mesh(), _config._check_vma(False):
        return mlir.lower_fun(function, multiple_results=True)(plain, *operands)


def register() -> None:
    mlir.register_lowering(_jax_code_p, _lower)
