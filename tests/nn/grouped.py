"""Grouped-query attention in plain JAX, and examples of the layer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eqxcallback import nn

from . import naive
from .naive import normal, quickly_compiled


KEY = jax.random.key(1)
HEADS, KV_HEADS, HEAD, SIZE, OUT, LENGTH = 6, 2, 4, 10, 7, 13
SIZES: Any = {"num_kv_heads": KV_HEADS, "head_size": HEAD, "output_size": OUT}
BIASES: Any = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
OPTIONS: list[Any] = [
    {},
    BIASES,
    {"causal": False},
    {"window": 4},
    {"causal": False, "window": 4},
    {"soft_cap": 0.5},
    {"alibi": True},
    {"rope_theta": 100.0},
    {"window": 4, "soft_cap": 0.5, "alibi": True, "rope_theta": 100.0, **BIASES},
]
COMBINED = OPTIONS[-1]


def text(options):
    return ", ".join(name for name in options if "bias" not in name) or ("biases" if options else "plain")


def make(**options: Any) -> Any:
    return nn.GroupedQueryAttention(HEADS, SIZE, key=KEY, **{**SIZES, **options})


def inputs(*batch, seed=0, length=LENGTH, dtype=jnp.float32):
    return jnp.asarray((3 * normal(seed, *batch, length, SIZE)).astype(dtype))


def naively(layer, x, kv=None, **options):
    """The layer in plain JAX, with an array of queries times keys."""
    wide, dtype = jnp.float64 if x.dtype == jnp.float64 else jnp.float32, x.dtype
    x = x.astype(wide)
    source = x if kv is None else kv.astype(wide)

    def project(linear, x, heads):
        out = jnp.einsum("si,oi->so", x, linear.weight.astype(wide), precision="highest")
        out = out if linear.bias is None else out + linear.bias.astype(wide)[None]
        return out.reshape(len(x), heads, -1)

    def rotate(x, first):
        if layer.rope_theta is None:
            return x
        angles = (first + np.arange(len(x)))[:, None] * layer.rope_theta ** (-np.arange(0, HEAD, 2) / HEAD)[None]
        cos, sin = (f(angles).astype(wide)[:, None] for f in (np.cos, np.sin))
        left, right = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)

    q = rotate(project(layer.query_proj, x, HEADS), len(source) - len(x))
    k = rotate(project(layer.key_proj, source, KV_HEADS), 0)
    v = project(layer.value_proj, source, KV_HEADS)
    out = naive.attention(
        q,
        k,
        v,
        causal=layer.causal,
        window=layer.window,
        soft_cap=layer.soft_cap,
        alibi=naive.slopes(HEADS) if layer.alibi else None,
        **options,
    )
    return project(layer.output_proj, out.reshape(len(x), -1), 1)[:, 0].astype(dtype)


def close(got, want, tolerance=1e-5):
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(1, np.abs(want).max(initial=0)))


def same(layer, *args, expected=None, **options):
    """`expected`: the options as `naively` takes them."""
    got = quickly_compiled(lambda *args: layer(*args, **options))(*args)
    want = quickly_compiled(lambda *args: naively(layer, *args, **(options if expected is None else expected)))(*args)
    close(got, want)
    return got
