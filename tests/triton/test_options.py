"""Attention with every option and all of its gradients, by the kernels in Triton, interpreted: the op itself, on the CPU."""

import dataclasses
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops
from eqxcallback.kernel._emulated import emulated
from eqxcallback.ops.attention import _triton, _triton_tiles as tiles
from eqxcallback.ops.attention._operands import places

from ..ops import table, test_transformations as transformations
from ..ops.attention.options import NAMES, inputs, options
from ..ops.families import tagged
from ..ops.table import normal


attention = importlib.import_module("eqxcallback.ops.attention._attention")
OP = dataclasses.replace(
    attention._attention,
    kernels={"cpu": emulated(_triton.ATTENTION)},
    backward={"cpu": emulated(_triton.ATTENTION_BACKWARD)},
)
QUERIES, KEYS, HEADS = 21, 37, 4


@pytest.fixture
def interpreted(monkeypatch):
    """The op runs the kernels in Triton, in tiles of 16: some see nothing, some all, and the last are not full."""
    pytest.importorskip("triton", reason="Triton is not installed")
    choice = tiles._choice

    def small(tile, size):
        found = choice(tile, size)
        return dataclasses.replace(found, constants=found.constants | {"BLOCK_QUERIES": 16, "BLOCK_KEYS": 16})

    monkeypatch.setattr(tiles, "_choice", small)
    monkeypatch.setattr(attention, "_attention", OP)
    table.quickly_compiled.cache_clear()
    yield
    table.quickly_compiled.cache_clear()


def value_and_gradients(name: str) -> Any:
    """Of both results, by all operands that have one."""
    (q, k, v), chosen = inputs(QUERIES, KEYS, HEADS, 2, 20), options(QUERIES, KEYS, HEADS)[name]
    numbers = {name: x for name, x in chosen.items() if name in ("bias", "alibi_slopes")}
    others = {name: x for name, x in chosen.items() if name not in numbers}

    def weighed(q, k, v, numbers):
        out, lse = ops.attention_with_lse(q, k, v, **numbers, **others)
        seen = jnp.where(jnp.isfinite(lse), lse, 0.0)
        return (out * normal(9, out.shape)).sum() + (seen * normal(10, lse.shape)).sum(), (out, lse)

    return jax.value_and_grad(weighed, argnums=(0, 1, 2, 3), has_aux=True)(q, k, v, numbers)


@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients(name, request):
    want = value_and_gradients(name)
    request.getfixturevalue("interpreted")
    got = value_and_gradients(name)

    def check(got, want):
        error = 2e-5 if got.dtype == np.float32 else 2**-7
        np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=error, atol=error)

    jax.tree.map(check, got, want)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("attention", "nested_vmap"),
        ("attention with options", "derivatives"),
        ("attention with options of a batch", "vmap_of_each_operand"),
    ],
)
def test_transformations(name, how):
    (row,) = (row for row in tagged("mapped") if row.name == name)
    getattr(transformations, f"test_{how}")(row(np.dtype(np.float32)))


@pytest.mark.usefixtures("interpreted")
def test_what_a_length_hides_may_be_nan():
    q, k, v = inputs(QUERIES, KEYS, HEADS, 2, 20)
    k[30:], v[30:] = np.nan, np.nan

    def summed(q, k, v):
        return ops.attention(q, k, v, lengths=np.int32(30), causal=True).sum()

    gradients = jax.grad(summed, (0, 1, 2))(q, k, v)
    want = jax.grad(lambda *x: ops.attention(*x, causal=True, offset=np.int32(KEYS - QUERIES)).sum(), (0, 1, 2))
    want = want(q, k[:30], v[:30])
    for got, right in zip(gradients, want, strict=True):
        np.testing.assert_allclose(got[: len(right)], right, rtol=2e-5, atol=2e-5)
        assert not np.any(got[len(right) :])


@pytest.mark.parametrize(
    ("batch", "own", "found"),
    [
        ((), (), (1, 1)),
        ((4,), (), (1, 1)),
        ((4,), (1,), (1, 1)),
        ((4,), (4,), (1, 4)),
        ((3, 4), (4,), (1, 4)),
        ((3, 4), (3, 1), (4, 3)),
        ((2, 3, 4), (1, 3, 1), (4, 3)),
        ((2, 3, 4), (2, 3, 4), (1, 24)),
        ((2, 3, 4), (2, 1, 4), None),
        ((2, 1, 4), (2, 1, 4), (1, 8)),
    ],
)
def test_examples_that_an_operand_has(batch, own, found):
    assert places(batch, own) == found
    if found is not None:
        every, count = found
        index = np.broadcast_to(np.arange(np.prod(own, dtype=int)).reshape(own), batch).ravel()
        assert [e // every % count for e in range(len(index))] == index.tolist()
