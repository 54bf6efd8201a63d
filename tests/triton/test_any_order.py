"""`deterministic=False`: gradients of queries that the kernel of keys adds up. Options are in test_options.py."""

import importlib
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops

from ..ops import test_transformations as transformations
from ..ops.attention.options import inputs
from ..ops.families import tagged
from .derived import check_each, value_and_gradients


pytest.importorskip("triton", reason="Triton is not installed")


@pytest.fixture
def as_default(interpreted, monkeypatch):
    attention = importlib.import_module("eqxcallback.ops.attention._attention")
    monkeypatch.setattr(attention, "_attention", attention._attention_added)


@pytest.mark.usefixtures("as_default")
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


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "kv_heads", "size", "dtype"),
    [
        (150, 170, 2, 1, 64, jnp.bfloat16),
        (150, 170, 1, 1, 80, jnp.bfloat16),
        (70, 130, 2, 2, 128, jnp.float16),
        (40, 50, 1, 1, 256, jnp.bfloat16),
        (50, 37, 4, 2, 20, jnp.float32),
        (1, 100, 2, 1, 64, jnp.float32),
        (30, 1, 2, 1, 20, jnp.float32),
    ],
)
def test_tiles_of_the_library(queries, keys, heads, kv_heads, size, dtype, request):
    operands = inputs(queries, keys, heads, kv_heads, size, dtype)
    want = value_and_gradients(tuple(np.asarray(x, np.float32) for x in operands), {"causal": True})
    request.getfixturevalue("on_triton")
    got = value_and_gradients(operands, {"causal": True}, deterministic=False)
    for x, right in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        assert x.dtype == dtype
        eps = 2e-5 if dtype == jnp.float32 else 3 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(x.astype(np.float32), right, rtol=0, atol=eps * max(1.0, float(np.abs(right).max())))


@pytest.mark.parametrize("causal", [True, False])
def test_keys_past_the_end_add_nothing(causal, request):
    """The last block of keys is not full. A key of zeros has an infinite weight where all logits are far below 0."""
    operands, chosen = inputs(21, 37, 4, 2, 20), {"bias": np.full((1, 21, 37), -1e4, np.float32), "causal": causal}
    want = value_and_gradients(operands, {"causal": causal})
    request.getfixturevalue("interpreted")
    got = value_and_gradients(operands, chosen, deterministic=False)
    for x, right in zip(got[1][:3], want[1][:3], strict=True):
        np.testing.assert_allclose(x, right, rtol=0, atol=5e-3)  # a sum with 1e4 is exact to 5e-4


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("needed", list(itertools.product([False, True], repeat=4))[1:], ids=str)
def test_gradients_that_are_not_needed(needed):
    q, k, v = inputs(21, 37, 4, 2, 20)
    values, wanted = (q, k, v, np.ones(4, np.float32)), [i for i, is_needed in enumerate(needed) if is_needed]

    def gradients(deterministic):
        def loss(*args):
            given = dict(zip(wanted, args, strict=True))
            *qkv, slopes = (given.get(i, x) for i, x in enumerate(values))
            return (ops.attention(*qkv, alibi_slopes=slopes, deterministic=deterministic) ** 2).sum()

        return jax.grad(loss, tuple(range(len(wanted))))(*(values[i] for i in wanted))

    check_each(gradients(False), gradients(True))


@pytest.mark.usefixtures("interpreted")
def test_nothing_to_add():
    for queries, keys in ((0, 17), (5, 0)):
        got = value_and_gradients(inputs(queries, keys, 2, 1, 20), {}, deterministic=False)[1]
        assert not any(np.any(x) for x in jax.tree.leaves(got))


BF16 = jax.ShapeDtypeStruct((150, 4, 64), jnp.bfloat16)


def of_gradients(deterministic, platform):
    def loss(q, k, v):
        return ops.attention(q, k, v, deterministic=deterministic).astype(jnp.float32).sum()

    return jax.jit(jax.grad(loss, (0, 1, 2))).trace(BF16, BF16, BF16).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.usefixtures("triton_cache")
@pytest.mark.parametrize(
    ("deterministic", "steps"), [(True, ["rows", "keys", "queries"]), (False, ["rows", "keys", "end"])], ids=str
)
def test_launches(deterministic, steps, monkeypatch):
    monkeypatch.setenv("EQXCALLBACK_CUDA_ARCH", "sm_90")
    _, entries = re.findall(r'entries = "(.*?)"', of_gradients(deterministic, "cuda"))
    assert entries.split("\\0A") == [f"attention_backward_{step}" for step in steps]


def test_other_platforms_know_one_order():
    assert of_gradients(False, "cpu") == of_gradients(True, "cpu")
