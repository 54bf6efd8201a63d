"""On a GPU a fused layer runs kernels, or what XLA does best, in both directions."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqxcallback as eqxc
from eqxcallback import ops, xla
from eqxcallback.fusion._twins import FUSED

from ..nn.drop_ins import CASES, ONE_OF_EACH, Case
from ..ops.on_cuda import BEST_BY_XLA


def _attention(*args: Any, **options: Any) -> Case:
    shapes = ((5, 6), (3, 6), (3, 6))
    return Case("MultiheadAttention", args, options, shapes, keyed=True)


LAYERS = [
    *CASES,
    _attention(2, 6),
    _attention(2, 6, use_query_bias=True, use_output_bias=True, inference=True),
    _attention(2, 6, dropout_p=0.25),
]
IN_16_BITS = [*ONE_OF_EACH, _attention(2, 6)]


def test_every_rule_is_here():
    assert {case.name for case in LAYERS} == {theirs.__name__ for theirs in FUSED}


def definitions(program: Any, *args: Any) -> list[str]:
    """The ops whose definition runs on a GPU, but for those that XLA does best."""
    made = [site.params["call"] for site in xla.call_sites(jax.make_jaxpr(program)(*args), "cuda")]
    without = [call for call in made if call.choice("cuda").kernel is None]
    assert made
    return [repr(call) for call in without if call.bound.name not in BEST_BY_XLA]


def test_forward_mode_is_a_definition():
    """As docs/gpus.md says. So they are told from kernels here."""
    (definition,) = definitions(lambda x: jax.jvp(ops.rms_norm, (x,), (x,)), jnp.ones((3, 8)))
    assert definition.startswith("rms_norm")
    assert definition.endswith(".jvp")


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, jnp.float32) for case in LAYERS),
        *((case, dtype) for case in IN_16_BITS for dtype in (jnp.bfloat16, jnp.float16)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_no_layer_becomes_a_definition(case, dtype):
    theirs = case.make(eqx.nn, dtype)
    fused, _ = eqxc.fuse(theirs, platform="cuda")
    assert type(fused) is FUSED[type(theirs)]
    numbers, static = eqx.partition((fused, case.inputs(dtype)), eqx.is_inexact_array)
    options = {"key": jax.random.key(2)} if case.options.get("dropout_p") else {}

    def call(numbers):
        layer, inputs = eqx.combine(numbers, static)
        return layer(*inputs, **options)

    def loss(numbers):
        return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(call(numbers)))

    assert not definitions(call, numbers)
    assert not definitions(jax.grad(loss), numbers)
