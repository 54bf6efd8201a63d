"""The calls that the functions of `ops` refuse, and what they say: the lists of all families, in <family>/refused.py."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops

from .families import FAMILIES
from .zeros import f32


REFUSED = {family: importlib.import_module(f"{__package__}.{family}.refused").REFUSED for family in FAMILIES}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(call, message, id=f"{family}-{i}-{message}")
        for family, calls in REFUSED.items()
        for i, (call, message) in enumerate(calls)
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


NO_BOOL: Any = "no"
NO_KEYS: list[Any] = [3, np.ones(2), NO_BOOL]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ops.attention(*[f32(3, 2, 4)] * 3, causal=NO_BOOL),
            "attention: expected causal to be True or False; got",
        ),
        (
            lambda: ops.attention(*[f32(3, 2, 4)] * 3, deterministic=NO_BOOL),
            "expected deterministic to be True or False",
        ),
        (
            lambda: ops.gelu(f32(4), approximate=NO_BOOL),
            "gelu: expected approximate to be True or False; got 'no' of type",
        ),
        (lambda: ops.geglu(f32(4), approximate=NO_BOOL), "geglu: expected approximate to be True or False; got 'no'"),
        *(
            (
                lambda key=key: ops.attention(*[f32(3, 2, 4)] * 3, dropout=0.5, key=key),
                "attention: expected key to be a key for each example, of jax.random.key; got",
            )
            for key in NO_KEYS
        ),
    ],
)
def test_arguments_of_another_type(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize("far", [np.array([2**32]), np.array([2**63], np.uint64), 2**32, -(2**40), np.int64(2**32)])
def test_integers_beyond_32_bits_are_the_nearest(far):
    """JAX cuts off the upper bits of Python's and NumPy's, without x64."""
    logits, table = jnp.arange(6.0).reshape(1, 6), jnp.arange(6.0).reshape(3, 2)
    nearest = 2**31 - 1 if np.all(np.asarray(far) > 0) else -(2**31)
    assert np.isnan(ops.softmax_cross_entropy(logits, far)).all()
    assert ops.softmax_cross_entropy(logits, far, ignore_index=int(np.ravel(far)[0])).tolist() == [0]
    np.testing.assert_array_equal(ops.embedding(far, table), ops.embedding(jnp.full(np.shape(far), nearest), table))
    q = jnp.ones((1, 3, 1, 4))
    np.testing.assert_array_equal(ops.attention(q, q, q, lengths=far), ops.attention(q, q, q, lengths=nearest))


F8 = [jnp.float8_e4m3fn, jnp.float8_e5m2]


@pytest.mark.parametrize("dtype", F8)
def test_dtypes_without_kernels_run_the_reference(dtype):
    """They may have 8 bits, which JAX promotes to nothing: results are rounded once."""

    def check(function, *args):
        wide = [arg.astype(jnp.float32) if jnp.issubdtype(arg.dtype, jnp.floating) else arg for arg in args]
        got, expected = (jax.tree.map(lambda x: x.astype(jnp.float32), function(*xs)) for xs in (args, wide))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.13, atol=0.02), got, expected)

    x, w = (jax.random.normal(jax.random.key(i), (4, 4)).astype(dtype) for i in range(2))
    with jax.numpy_dtype_promotion("strict"):
        check(ops.linear, x, w)
        check(ops.rms_norm, x)
        check(ops.softmax, x)
        check(ops.gelu, x)
        check(lambda x, w: ops.swiglu(x, w), x, w)
        check(lambda w: ops.embedding(jnp.array([2, 0]), w), w)
        check(lambda x: ops.attention(x[:, None], x[:, None], x[:, None], causal=True), x)
