"""`quantized_linear_swiglu` has the values of the two ops, and runs them if no kernel does both."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import eqxcallback as eqxc
from eqxcallback import nn, ops

from .. import table
from ..table import DTYPES, normal
from .cases import blocks, quantized_linear_swiglu


F32 = DTYPES[0]


def of_two(x, weights, implementation: Any = "auto", **options):
    both = ops.quantized_linear(x, weights, implementation=implementation, **options)
    return ops.swiglu(both, implementation=implementation)


def program(function, *args, **options):
    # Programs of one name are equal.
    return jax.jit(lambda *args: function(*args, **options)).lower(*args).as_text()


@pytest.mark.parametrize("activations", ["exact", "int8"])
@pytest.mark.parametrize("encoding", ["Q4_1", "Q8_0", "Q4_1_R16", "Q6_K"])
def test_a_cpu_runs_the_program_of_the_two_ops(encoding, activations):
    x, weights = normal(1, (3, 256)), blocks(2, 32, 256, encoding)
    options = {"encoding": encoding, "activations": activations}
    one = program(ops.quantized_linear_swiglu, x, weights, **options)
    assert one == program(of_two, x, weights, **options)
    assert one.count("custom_call @eqxcallback_") == 2


@pytest.mark.parametrize("implementation", ["native", "python", "reference"])
def test_another_implementation_is_that_of_both(implementation):
    call = functools.partial(ops.quantized_linear_swiglu, encoding="Q4_1", implementation=implementation)
    calls = eqxc.inspect(call, normal(1, (3, 64)), blocks(2, 10, 64, "Q4_1")).calls
    assert [(call.op, call.lane) for call in calls] == [
        ("quantized_linear", implementation),
        ("swiglu", implementation),
    ]


def test_derivatives_and_devices():
    case = quantized_linear_swiglu(F32, "Q8_0", (3,), 64, 5)
    x, weights = map(jnp.asarray, case.args)
    names = ("grad", "jvp", "hessian", "checkpoint", "vmap of grad", "sharded jit", "shard_map", "export")
    eqxc.testing.check(lambda x: case.op(x, weights), x, reference=lambda x: case.reference(x, weights), only=names)


def test_a_gradient_costs_no_product_again():
    """XLA joins what derivatives compute of the two ops with the value."""
    x, weights = normal(1, (3, 64)), blocks(2, 10, 64, "Q8_0")
    loss = lambda x: (ops.quantized_linear_swiglu(x, weights, encoding="Q8_0") ** 2).sum()
    text = str(jax.jit(jax.grad(loss)).lower(x).compile().as_text())
    targets = ("eqxcallback_quantized_linear", "eqxcallback_glu", "eqxcallback_glu_backward")
    assert [text.count(f'custom_call_target="{target}"') for target in targets] == [1, 1, 1]


@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("encoding", ["Q4_1", "Q8_0", "int8"])
def test_layer(encoding, use_bias):
    linear = nn.Linear(64, 32, use_bias=use_bias, key=jax.random.key(0))
    layer = nn.QuantizedLinear.from_linear(linear, encoding=encoding)
    x = normal(1, (3, 64))
    for stored in (layer, layer.packed()):
        got, want = (
            table.quickly_compiled(jax.vmap(f))(x) for f in (stored.then_swiglu, lambda x, of=stored: ops.swiglu(of(x)))
        )
        assert got.shape == (3, 16)
        assert (got == want).all()
