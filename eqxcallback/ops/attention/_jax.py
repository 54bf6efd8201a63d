"""Attention as XLA does it best on a GPU, for options that no kernel of ours has there: all queries at once, as long as their
logits fit into memory, by products of the dtype of the queries.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from ...core import Size
from ...kernel import JaxKernel
from .._jax import backward_of, product
from .._precision import wide
from .._supports import floats_or_f64
from . import _reference
from ._of_pair import of_pair
from ._operands import OPTIONAL, OWN_AXES


# Logits that are in memory at the same time: 1 GiB of them in f32. Of f64 half as many are.
_LOGITS = 2**28


def _queries(q: Array, keys: Size) -> Size:
    """Return how many queries of each head are worked on at a time."""
    of_each = math.prod(q.shape[:-3]) * q.shape[-2] * keys
    most = _LOGITS * 4 // wide(q.dtype).itemsize
    return max(most // max(of_each, 1), _reference.ROWS)


def _logits(dtype: DTypeLike, q: Array, k: Array, scale: float) -> Array:
    return scale * product("...skgd,...tkd->...kgst", dtype, q, k)


def _values(dtype: DTypeLike, weights: Array, v: Array) -> Array:
    return product("...kgst,...tkd->...skgd", dtype, weights, v)


def _for_gpus(q: Array, k: Array) -> dict[str, Any]:
    products = functools.partial(_logits, q.dtype), functools.partial(_values, q.dtype)
    return {"products": products, "rows": _queries(q, k.shape[-3])}


def with_axes_of(q: Array, kv: Sequence[Array]) -> list[Array]:
    """Keys and values that `vmap` does not map lack its axes, which they get here."""
    return [jnp.broadcast_to(x, (*q.shape[: q.ndim - 3], *x.shape[-3:])) for x in kv]


def _ranked(x: Any, rank: int) -> Any:
    return None if x is None else jnp.expand_dims(x, range(rank - x.ndim))


def attention(q: Array, kv: Sequence[Array], *optional: Array | None, **options: object) -> tuple[Array, Array]:
    k, v = with_axes_of(q, kv)
    ranked = (_ranked(x, q.ndim - 3 + OWN_AXES[name]) for x, name in zip(optional, OPTIONAL, strict=False))
    return of_pair(q, (k, v), *ranked, **options, **_for_gpus(q, k))


def decode_attention(
    q: Array,
    kv: Sequence[Array],
    length: Array,
    alibi_slopes: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    **options: object,
) -> Array:
    one = q[..., None, :, :]
    k, v = with_axes_of(one, kv)
    batch = q.ndim - 2
    k_scale, v_scale = (None if x is None else jnp.broadcast_to(x, k.shape[:-1]) for x in (k_scale, v_scale))
    length, alibi_slopes = _ranked(length, batch), _ranked(alibi_slopes, batch + 1)
    return _reference.decode_attention(q, k, v, length, alibi_slopes, k_scale, v_scale, **options, **_for_gpus(one, k))


ATTENTION = JaxKernel(attention, supports=floats_or_f64, differentiable=attention)
ATTENTION_BACKWARD = JaxKernel(backward_of(attention), supports=floats_or_f64)
DECODE_ATTENTION = JaxKernel(decode_attention, supports=floats_or_f64, differentiable=decode_attention)
DECODE_ATTENTION_BACKWARD = JaxKernel(backward_of(decode_attention), supports=floats_or_f64)
