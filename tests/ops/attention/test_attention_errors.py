"""The options that attention refuses, and what it says."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops

from ..zeros import f32, i32


def attend(batch=(), queries=3, keys=5, size=4, **options: Any):
    q, kv = jnp.zeros((*batch, queries, 2, size)), jnp.zeros((*batch, keys, 1, size))
    return ops.attention(q, kv, kv, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, r"attention: expected window to be a positive integer or None; got 0\."),
        ({"window": 2.0}, r"window to be a positive integer or None; got 2\.0"),
        ({"window": True}, r"window to be a positive integer or None; got True"),
        ({"window": np.bool_(True)}, r"window to be a positive integer or None; got np.True_"),
        (
            {"window": (1, 2, 3)},
            r"window to be a number of keys, or a tuple of those before and after a query; got \(1, 2, 3\)",
        ),
        ({"window": (-2, 1)}, r"a tuple of those before and after a query, 0 or more; got -2"),
        (
            {"window": (2, None)},
            r"a number of keys after a query, which may be None under causal=True; got window=\(2, None\)",
        ),
        (
            {"window": (2, 1), "alibi_slopes": f32(2)},
            r"a window that is causal or a number, with alibi_slopes; got \(2, 1\)",
        ),
        ({"window": "2"}, r"window to be a positive integer or None; got '2'"),
        ({"window": np.int64(0)}, r"window to be a positive integer or None; got np.int64\(0\)"),
        ({"soft_cap": 0.0}, r"attention: expected soft_cap to be a positive number or None; got 0\.0\."),
        ({"soft_cap": float("inf")}, r"soft_cap to be a positive number or None; got inf"),
        ({"soft_cap": "a"}, r"attention: expected soft_cap to be a positive number or None; got 'a'\."),
        ({"soft_cap": 1e-50}, r"soft_cap to be a positive number or None; got 1e-50\."),  # 0 in f32
        ({"scale": "a"}, r"attention: expected scale to be a number or None; got 'a'\."),
        ({"scale": float("nan")}, r"attention: expected scale to be a number or None; got nan\."),
        ({"dropout": "0.1"}, r"attention: expected dropout to be a number from 0 up to, and without, 1; got '0\.1'\."),
        ({"dropout": 1.0}, r"attention: expected dropout to be a number from 0 up to, and without, 1; got 1\.0\."),
        ({"dropout": -0.1}, r"dropout to be a number from 0"),
        ({"dropout": 0.1}, r"expected a key for dropout=0\.1; got None\. Pass key=, or dropout=0\."),
        (
            {"dropout": 0.1, "key": jax.random.split(jax.random.key(0))},
            r"a key for each example, of shape \(\); got key",
        ),
        ({"dropout": 0.1, "key": jax.random.key(0), "batch": (2,)}, r"a key for each example, of shape \(2,\)"),
        ({"bias": i32(2, 3, 5)}, r"attention: expected bias of a floating dtype; got bias: int32\[2,3,5\]"),
        (
            {"bias": f32(2, 5)},
            r"expected bias that broadcasts to \(2, 3, 5\); got bias: float32\[2,5\]",
        ),
        ({"bias": f32(3, 3, 5)}, r"expected bias that broadcasts to \(2, 3, 5\)"),
        ({"bias": f32(1, 2, 3, 5)}, r"expected bias that broadcasts to \(2, 3, 5\)"),
        (
            {"bias": f32(3, 2, 3, 5), "batch": (2,)},
            r"expected bias that broadcasts to \(2, 2, 3, 5\); got bias: float32",
        ),
        (
            {"mask": f32(2, 3, 5)},
            r"attention: expected mask of dtype bool, True where a key is seen; got mask: float32",
        ),
        ({"mask": np.ones((2, 5, 3), bool)}, r"expected mask that broadcasts to \(2, 3, 5\)"),
        (
            {"alibi_slopes": f32(1)},
            r"alibi_slopes of shape \(2,\) and a floating dtype; got alibi_slopes: float32\[1\]",
        ),
        ({"alibi_slopes": i32(2)}, r"alibi_slopes of shape \(2,\) and a floating dtype"),
        ({"segment_ids": i32(3)}, r"segment_ids of queries and of keys, a tuple; got queries: 3, keys: 5"),
        ({"segment_ids": (i32(3), i32(3))}, r"segment_ids to be int32 of shape \(5,\); got segment_ids: int32\[3\]"),
        ({"segment_ids": (f32(3), i32(5))}, r"segment_ids to be int32 of shape \(3,\)"),
        ({"segment_ids": i32(3), "keys": 3, "batch": (2,)}, r"segment_ids to be int32 of shape \(2, 3\)"),
        ({"lengths": f32()}, r"attention: expected lengths to be integers of shape \(\); got lengths: float32"),
        ({"lengths": i32(3), "batch": (2,)}, r"expected lengths to be integers of shape \(\) or \(2,\)"),
        ({"offset": i32(3)}, r"attention: expected offset to be integers"),
        (
            {"size": 257, "implementation": "triton"},
            r"supports; .*triton kernel attention_forward: heads have to be no longer than 256; they are 257",
        ),
    ],
)
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        attend(**options)


def test_a_window_of_numpy():
    q = jax.random.normal(jax.random.key(0), (5, 2, 4))
    kv = q[:, :1]
    window: Any = np.int64(2)
    np.testing.assert_array_equal(
        ops.attention(q, kv, kv, causal=True, window=window), ops.attention(q, kv, kv, causal=True, window=2)
    )
    np.testing.assert_array_equal(
        ops.decode_attention(q[0], kv, kv, 4, window=window), ops.decode_attention(q[0], kv, kv, 4, window=2)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": -1}, r"decode_attention: expected window to be a positive integer or None; got -1\."),
        ({"soft_cap": -1.0}, r"decode_attention: expected soft_cap to be a positive number or None; got -1\.0\."),
        ({"scale": [1.0]}, r"decode_attention: expected scale to be a number or None; got \[1\.0\]\."),
        ({"alibi_slopes": f32(3)}, r"decode_attention: expected alibi_slopes of shape \(2,\)"),
    ],
)
def test_refused_of_one_token(options, message):
    with pytest.raises(ValueError, match=message):
        ops.decode_attention(f32(2, 4), f32(5, 1, 4), f32(5, 1, 4), 3, **options)


@pytest.mark.parametrize(
    ("dtype", "k_scale", "v_scale", "message"),
    [
        (jnp.int8, f32(5, 1), None, r"expected both k_scale and v_scale, or none; got k_scale"),
        (jnp.int8, None, None, r"expected q, k, v of one floating dtype"),
        (
            jnp.float32,
            f32(5, 1),
            f32(5, 1),
            r"expected k and v in int8 with k_scale and v_scale; got k: float32\[5,1,4\]",
        ),
        (jnp.int8, f32(5), f32(5), r"expected k_scale and v_scale of shape \(5, 1\); got k_scale: float32\[5\]"),
        (jnp.int8, f32(5, 1).astype(jnp.int32), f32(5, 1), r"expected k_scale, v_scale of one floating dtype"),
    ],
)
def test_one_token_in_int8(dtype, k_scale, v_scale, message):
    k = jnp.zeros((5, 1, 4), dtype)
    with pytest.raises(ValueError, match=f"decode_attention: {message}"):
        ops.decode_attention(f32(2, 4), k, k, 3, k_scale=k_scale, v_scale=v_scale)
