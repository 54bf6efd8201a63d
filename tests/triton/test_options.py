"""Attention with every option and all of its gradients, by the kernels in Triton, interpreted: the op itself, on the CPU."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops
from eqxcallback.ops.attention import _triton
from eqxcallback.ops.attention._operands import places

from ..ops import test_transformations as transformations
from ..ops.attention.options import NAMES, exact, exact_with_lse, inputs, options
from ..ops.families import tagged
from ..ops.table import normal
from .derived import check_each, value_and_gradients


QUERIES, KEYS, HEADS = 21, 37, 4


@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients(name, request):
    operands, chosen = inputs(QUERIES, KEYS, HEADS, 2, 20), options(QUERIES, KEYS, HEADS)[name]
    want = value_and_gradients(operands, chosen)
    request.getfixturevalue("interpreted")
    check_each(value_and_gradients(operands, chosen), want)


@pytest.mark.parametrize("causal", [True, False])
def test_logits_far_below_zero(causal, request):
    """The last block of keys is not full. A key of zeros past the end would have an infinite weight."""
    operands = inputs(QUERIES, KEYS, HEADS, 2, 20)
    want = value_and_gradients(operands, {"causal": causal})[1]
    request.getfixturevalue("interpreted")
    bias = np.full((1, QUERIES, KEYS), -1e4, np.float32)
    got = value_and_gradients(operands, {"bias": bias, "causal": causal})[1]
    for x, right in zip(got[:3], want[:3], strict=True):
        np.testing.assert_allclose(x, right, rtol=0, atol=5e-3)  # a sum with 1e4 is exact to 5e-4


@pytest.mark.parametrize(("dtype", "value"), [(np.float32, 100), (np.float16, 12)])
def test_a_bias_of_keys_that_weighs_much(dtype, value, request):
    """The last block of queries is not full. A query of zeros past the end would have an infinite weight for that key."""
    operands = tuple(x.astype(dtype) for x in inputs(21, KEYS, HEADS, 2, 20))
    bias = np.zeros((1, 1, KEYS), dtype)
    bias[..., 3] = value
    want = value_and_gradients(operands, {"bias": bias})[1]
    request.getfixturevalue("interpreted")
    got = value_and_gradients(operands, {"bias": bias})[1]
    for x, right in zip(got[:3], want[:3], strict=True):
        np.testing.assert_allclose(x, right, rtol=0, atol=1e-4 if dtype == np.float32 else 3e-2)


@pytest.mark.parametrize("others", [(), (0,), (1,)], ids=["alone", "and of queries", "and of keys"])
def test_gradients_of_slopes(others, request):
    """Their parts are of the kernel of queries, also where no gradient of these is needed."""
    operands = (*inputs(QUERIES, KEYS, HEADS, 2, 20), np.linspace(0.1, 1.0, HEADS, dtype=np.float32))

    def gradients():
        def loss(q, k, v, slopes):
            return (ops.attention(q, k, v, alibi_slopes=slopes) ** 2).sum()

        return jax.grad(loss, (*others, 3))(*operands)

    want = gradients()
    request.getfixturevalue("interpreted")
    check_each(gradients(), want)


@pytest.mark.usefixtures("interpreted")
def test_gradients_of_nothing():
    for queries, keys in ((0, 17), (5, 0)):
        assert not any(np.any(x) for x in jax.tree.leaves(value_and_gradients(inputs(queries, keys, 2, 1, 20), {})[1]))


def test_heads_without_elements(request):
    """Weights of a bias alone, which has gradients."""
    operands, bias = inputs(3, 5, 2, 1, 0), np.ones((1, 3, 5), np.float32)

    def gradient():
        return jax.value_and_grad(lambda bias: ops.attention_with_lse(*operands, bias=bias)[1].sum())(bias)

    want = gradient()
    request.getfixturevalue("interpreted")
    check_each(gradient(), want)


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


FEW_QUERIES = {
    **options(9, 70, 4),
    "plain": {},
    "causal": {"causal": True},
    "length below a part": {"lengths": np.int32(3), "causal": True},
}


@pytest.fixture
def in_parts(interpreted, monkeypatch):
    """Blocks of 16 rows, which are queries and heads, and parts of 16 keys."""
    for name in ("_MIN_KEYS", "_MIN_PART_KEYS"):
        monkeypatch.setattr(_triton, name, 16)


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("name", FEW_QUERIES)
def test_few_queries(name):
    """Two heads for each head of keys. Parts of a window, or beyond a length, are empty."""
    q, k, v = inputs(9, 70, 4, 2, 20)
    assert _triton._parts(q, (k, v)) == 5
    got = ops.attention_with_lse(q, k, v, **FEW_QUERIES[name])
    for x, want in zip(got, exact_with_lse(q, k, v, **FEW_QUERIES[name]), strict=True):
        np.testing.assert_allclose(x, want, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("in_parts")
def test_more_parts_than_are_joined_at_once():
    q, k, v = inputs(3, 600, 4, 2, 20)
    assert _triton._parts(q, (k, v)) == 38
    for x, want in zip(ops.attention_with_lse(q, k, v), exact_with_lse(q, k, v), strict=True):
        np.testing.assert_allclose(x, want, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("in_parts")
def test_few_queries_under_vmap():
    """Examples have their lengths, and share their keys or do not. What a length hides is NaN."""
    (q, k, v), lengths = (
        (normal(i, (3, n, heads, 20)) for i, n, heads in ((1, 5, 3), (2, 70, 1), (3, 70, 1))),
        (70, 0, 20),
    )
    for example, length in enumerate(lengths):
        k[example, length:], v[example, length:] = np.nan, np.nan
    lengths = np.asarray(lengths, np.int32)

    def f(q, k, v, length):
        return ops.attention(q, k, v, lengths=length)

    of_own = jax.vmap(f)(q, k, v, lengths)
    of_first = jax.vmap(f, (0, None, None, 0))(q, k[0], v[0], lengths)
    for example, length in enumerate(lengths):
        for got, keys in ((of_own, example), (of_first, 0)):
            want = exact(q[example], k[keys, :length], v[keys, :length])
            np.testing.assert_allclose(got[example], want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("heads", "size", "dtype"), [(8, 128, jnp.bfloat16), (1, 200, jnp.float16), (6, 80, jnp.float32)]
)
@pytest.mark.usefixtures("on_triton")
def test_few_queries_in_the_tiles_of_the_library(heads, size, dtype):
    q, k, v = inputs(7, 530, heads, 1, size, dtype)
    out, lse = ops.attention_with_lse(q, k, v, causal=True)
    want = exact_with_lse(q, k, v, causal=True)
    error = 2e-5 if dtype == jnp.float32 else 2**-7
    np.testing.assert_allclose(out.astype(np.float32), want[0], rtol=error, atol=error)
    np.testing.assert_allclose(lse, want[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("queries", "heads", "kv_heads", "keys", "multiprocessors", "parts"),
    [
        (8, 32, 8, 32768, 132, 33),  # two programs for each multiprocessor
        (8, 32, 8, 32768, 108, 27),
        (32, 32, 8, 32768, 132, 16),  # two blocks of 64 rows
        (8, 32, 8, 512, 132, 4),  # parts of 128 keys at least
        (8, 32, 8, 511, 132, 0),
        (33, 32, 8, 32768, 132, 0),
        (8, 512, 128, 32768, 132, 2),
        (8, 1024, 256, 32768, 132, 1),  # heads are packed for their keys' sake
        (8, 256, 256, 32768, 132, 0),
        (0, 32, 8, 32768, 132, 0),
    ],
)
def test_parts_of_keys(queries, heads, kv_heads, keys, multiprocessors, parts, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda backend: [SimpleNamespace(core_count=multiprocessors)])
    q, k = (jax.ShapeDtypeStruct((n, count, 128), jnp.bfloat16) for n, count in ((queries, heads), (keys, kv_heads)))
    assert _triton._parts(q, (k, k)) == parts


@pytest.mark.parametrize(
    ("batch", "shape", "expected"),
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
def test_examples_that_an_operand_has(batch, shape, expected):
    assert places(batch, shape) == expected
    if expected is not None:
        every, count = expected
        index = np.broadcast_to(np.arange(np.prod(shape, dtype=int)).reshape(shape), batch).ravel()
        assert [e // every % count for e in range(len(index))] == index.tolist()
