"""The rules of Taylor mode, `jax.experimental.jet`: kernels compute values, and pure JAX the series."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import jet

from ...core import AnyArray, Value
from ._evaluate import evaluate_without
from ._op_call import OpCall, of_some, op_call_p
from ._product import product_p
from ._python_call import effectful_call_p, no_derivative, python_call_p
from ._tap import tap_p


_Series = Sequence[Sequence[Any]]  # for each array, its terms

# What JAX has no rules for, or rules that fail, as they do for `jax.nn.relu`.
_CALLS = ("jit", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call")


def _series_of(function: Callable[..., Sequence[Value]], primals: Sequence[Value], series: _Series) -> _Series:
    # Numbers that do not differentiate, such as lengths, have terms too, which are zeros.
    smooth = [i for i, primal in enumerate(primals) if jnp.issubdtype(jnp.result_type(primal), jnp.inexact)]
    of = [primals[i] for i in smooth]
    traced = jax.make_jaxpr(of_some(function, primals, smooth))(*of)
    if not smooth:
        return [[jnp.zeros(aval.shape, aval.dtype)] * len(series[0]) for aval in traced.out_avals]
    # Terms are not multiplied by factorials inside of rules.
    _, terms = jet.jet(
        lambda *args: evaluate_without(_CALLS, traced, args), of, [series[i] for i in smooth], factorial_scaled=False
    )
    return terms


def _of_op(primals: Sequence[Value], series: _Series, *, call: OpCall) -> tuple[Sequence[AnyArray], _Series]:
    return op_call_p.bind(*primals, call=call), _series_of(call.reference, primals, series)


def _of_product(primals: Sequence[Value], series: _Series, *, product: Any) -> tuple[AnyArray, Sequence[Any]]:
    def compute(a: Value, b: Value) -> Sequence[Value]:
        return [product.compute(a, b, lambda x, dtype: x.astype(dtype))]

    (terms,) = _series_of(compute, primals, series)
    return product_p.bind(*primals, product=product), terms


def _of_tap(primals: Sequence[Value], series: _Series, **params: Any) -> tuple[Sequence[AnyArray], _Series]:
    return tap_p.bind(*primals, **params), series


def register() -> None:
    jet.jet_rules[op_call_p] = _of_op
    jet.jet_rules[product_p] = _of_product
    jet.jet_rules[tap_p] = _of_tap
    for primitive in (python_call_p, effectful_call_p):
        jet.jet_rules[primitive] = no_derivative("Taylor series")
