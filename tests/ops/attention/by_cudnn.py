"""Attention as it is where the process has a GPU with cuDNN, or has none, and JAX's own formulas in the place of cuDNN."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from eqxcallback.ops.attention import _cudnn
from eqxcallback.transform._bind_op import bind_op


@contextlib.contextmanager
def of_any_size(least: float = 0) -> Iterator[None]:
    """cuDNN takes calls of few operations too. **Arguments:** `least`: from how many on."""
    bind_op.cache_clear()  # a call keeps which kernel it has chosen
    with mock.patch.object(_cudnn, "LEAST_OPERATIONS", least):
        yield
    bind_op.cache_clear()


@contextlib.contextmanager
def usable(reason: str | None = None, least: float = 0) -> Iterator[None]:
    """**Arguments:** `reason`: why cuDNN cannot be used. By default it can, by calls of any size."""
    with of_any_size(least), mock.patch.object(_cudnn, "why_no_cudnn", return_value=reason):
        yield


def forward(q: Any, k: Any, v: Any, *, scale: float, causal: bool, window: int | None) -> Any:
    """As `cudnn_attention`, by `jax.nn.dot_product_attention`, in f32."""
    out, lse = jax.nn.dot_product_attention(
        *(x.astype(jnp.float32) for x in (q, k, v)),
        scale=scale,
        is_causal=causal,
        local_window_size=None if window is None else (window - 1, 0),
        return_residual=True,
        implementation="xla",
    )
    return out.astype(q.dtype), jnp.swapaxes(lse, 1, 2)


def backward(q: Any, k: Any, v: Any, out: Any, lse: Any, cotangent: Any, **options: Any) -> Any:
    """As `cudnn_attention_backward`. What it is given has to be what `forward` returns."""
    pulled = jax.vjp(lambda *args: forward(*args, **options)[0], q, k, v)[1](cotangent)
    expected = forward(q, k, v, **options)
    pairs = zip(expected, (out, lse), strict=True)
    off = sum(jnp.max(jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32))) for a, b in pairs)
    return tuple(jnp.where(off < 1e-2, x, jnp.nan) for x in pulled)
