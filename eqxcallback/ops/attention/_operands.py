"""The optional operands of attention: what they have to be, and what the op gets."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from ...core import AnyInt, AnyNumber, Size, check, check_floats, integer, integers, number
from .._supports import KERNEL_DTYPES


# Positions further away than any array is long. Sums of them and of an index are int32. A window is shorter.
FAR = 2**30

# In the order in which the op takes them.
OPTIONAL = (
    "bias",
    "mask",
    "alibi_slopes",
    "query_segments",
    "key_segments",
    "lengths",
    "offset",
    "dropout_keys",
    "kept",
)

# Beside a bit for each of these: of an operand whose one row queries share.
OF_KEYS = {"bias": 1 << len(OPTIONAL), "mask": 2 << len(OPTIONAL)}

# How many axes each has beside those of the batch.
OWN_AXES = {
    "bias": 3,
    "mask": 3,
    "alibi_slopes": 1,
    "query_segments": 1,
    "key_segments": 1,
    "lengths": 0,
    "offset": 0,
    "dropout_keys": 2,
    "kept": 3,
}

Segments = ArrayLike | tuple[ArrayLike, ArrayLike] | None


def operands(
    name: str,
    q: Array,
    keys: Size,
    *,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    segment_ids: Segments = None,
    lengths: ArrayLike | None = None,
    offset: ArrayLike | None = None,
    dropout: AnyNumber = 0.0,
    key: object = None,
) -> dict[str, Any]:
    """`OPTIONAL` by name, `None` where one is absent. All have the batch axes of `q`, perhaps of size 1."""
    batch, heads = q.shape[:-3], q.shape[-2]
    dropout_keys, kept = _dropout(name, q, keys, dropout, key)
    segments = _segments(name, segment_ids, q, keys)
    array = None if mask is None else _mask(name, mask, q, keys)
    if array is not None and segment_ids is None and array.shape[-3] == 1 and is_of_keys(array, q.shape[-3]):
        # A mask of keys is two segments, the seen and the hidden: no array of queries times keys.
        seen = jnp.broadcast_to(array[..., 0, 0, :], (*array.shape[:-3], keys))
        of_keys = jnp.where(seen, 0, 1).astype(jnp.int32)
        segments = {"query_segments": jnp.zeros((*[1] * len(batch), q.shape[-3]), jnp.int32), "key_segments": of_keys}
        array = None
    return {
        "bias": None if bias is None else _every_key(_bias(name, bias, q, keys), keys),
        "mask": None if array is None else _every_key(array, keys),
        "alibi_slopes": None if alibi_slopes is None else slopes_of(name, alibi_slopes, q, batch, heads),
        **segments,
        "lengths": None if lengths is None else integers(name, "lengths", lengths, batch),
        "offset": None if offset is None else jnp.clip(integers(name, "offset", offset, batch), -FAR, FAR),
        "dropout_keys": dropout_keys,
        "kept": kept,
    }


def slopes_of(name: str, x: ArrayLike, q: Array, batch: tuple[Size, ...], heads: int) -> Array:
    x = jnp.asarray(x)
    fits = x.shape in ((heads,), (*batch, heads)) and jnp.issubdtype(x.dtype, jnp.floating)
    shapes = f"({heads},)" + (f" or {(*batch, heads)}" if batch else "")
    check(fits, name, f"alibi_slopes of shape {shapes} and a floating dtype", alibi_slopes=x)
    x = x.astype(jnp.float64 if q.dtype == jnp.float64 else jnp.float32)
    return x if x.ndim > 1 else x.reshape(*[1] * len(batch), heads)


def check_keys(name: str, q: Array, k: Array, v: Array, batch: tuple[Size, ...], *, int8: bool = False) -> None:
    """Values may have another size than keys, which is for the caller to refuse."""
    if int8:
        check_floats(name, q=q)
        check(k.dtype == v.dtype == jnp.int8, name, "k and v in int8 with k_scale and v_scale", k=k, v=v)
    else:
        check_floats(name, q=q, k=k, v=v)
    heads, size = q.shape[-2:]
    check(
        k.shape[:-1] == v.shape[:-1] and k.ndim == len(batch) + 3,
        name,
        "k and v of shape (*batch, keys, kv_heads, size)",
        k=k,
        v=v,
    )
    check(k.shape[:-3] == batch and k.shape[-1] == size, name, "q and k of the same batch axes and head size", q=q, k=k)
    kv_heads = k.shape[-2]
    check(
        kv_heads > 0 and heads % kv_heads == 0,
        name,
        f"the heads of q, {heads}, to be a multiple of those of k, {kv_heads}",
        q=q,
        k=k,
    )


def window_of(name: str, window: AnyInt | None) -> int:
    if window is None:
        return 0
    return min(integer(name, "window to be a positive integer or None", window, least=1), FAR - 1)


Window = AnyInt | tuple[AnyInt | None, AnyInt | None] | None


def causal_window(name: str, window: Window, causal: bool, alibi: bool) -> tuple[bool, int, int]:
    """`window` as the kernels have it: `causal`, a number, and by how much the positions of queries grow.

    The keys from `p - left` to `p + right` are those that a causal query at `p + right` sees of its last `left + right + 1`.
    """
    if not isinstance(window, tuple):
        return causal, window_of(name, window), 0
    expected = "window to be a number of keys, or a tuple of those before and after a query"
    if len(window) != 2:
        raise ValueError(f"{name}: expected {expected}; got {window!r}.")
    # -1 is PyTorch's and FlashAttention's word for None.
    left, right = (
        None if side in (None, -1) else integer(name, f"{expected}, 0 or more", side, least=0) for side in window
    )
    if causal:
        right = 0
    if right is None:
        if left is None:
            return causal, 0, 0
        raise ValueError(
            f"{name}: expected a number of keys after a query, which may be None under causal=True; got window={window!r}. "
            "Pass one that is as large as the number of keys."
        )
    if right and alibi:
        raise ValueError(
            f"{name}: expected a window that is causal or a number, with alibi_slopes; got {window!r}. Pass mask= in its place."
        )
    right = min(right, FAR // 2)  # the sum with an offset is int32
    return True, 0 if left is None else min(left, FAR - 2 - right) + right + 1, right


def dropout_of(name: str, dropout: AnyNumber, key: object) -> float:
    expected = "dropout to be a number from 0 up to, and without, 1"
    rate = number(name, expected, dropout, least=0, most=math.nextafter(1, 0))
    if rate and key is None:
        raise ValueError(f"{name}: expected a key for dropout={dropout!r}; got None. Pass key=, or dropout=0.")
    return rate


def _per_pair(name: str, what: str, x: Array, q: Array, keys: Size) -> Array:
    """`x`, which broadcasts to `(*batch, heads, queries, keys)`, with as many axes."""
    batch, shape = q.shape[:-3], (*q.shape[:-3], q.shape[-2], q.shape[-3], keys)
    fits = x.ndim <= len(shape) and all(a in (1, b) for a, b in zip(x.shape[::-1], shape[::-1], strict=False))
    check(fits, name, f"{what} that broadcasts to ({', '.join(map(str, (*batch, *shape[-3:])))})", **{what: x})
    return x.reshape(*[1] * (len(shape) - x.ndim), *x.shape)


def _every_key(x: Array, keys: Size) -> Array:
    """`x` for each key: kernels share it among examples, heads and queries only."""
    return jnp.broadcast_to(x, (*x.shape[:-1], keys))


def is_of_keys(x: Any, queries: Size) -> bool:
    """Tell whether several queries share the one row of `x`: a bias or a mask, or `None`."""
    return x is not None and x.shape[-2] == 1 and queries != 1


def _bias(name: str, bias: ArrayLike, q: Array, keys: Size) -> Array:
    x = jnp.asarray(bias)
    check(jnp.issubdtype(x.dtype, jnp.floating), name, "bias of a floating dtype", bias=x)
    x = _per_pair(name, "bias", x, q, keys)
    return x.astype(jnp.float32) if q.dtype in KERNEL_DTYPES and x.dtype not in KERNEL_DTYPES else x


def _mask(name: str, mask: ArrayLike, q: Array, keys: Size) -> Array:
    x = jnp.asarray(mask)
    check(x.dtype == jnp.bool_, name, "mask of dtype bool, True where a key is seen", mask=x)
    return _per_pair(name, "mask", x, q, keys)


def _segments(name: str, segment_ids: Segments, q: Array, keys: Size) -> dict[str, Array | None]:
    if segment_ids is None:
        return {"query_segments": None, "key_segments": None}
    batch, queries = q.shape[:-3], q.shape[-3]
    both: Any = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    if len(both) != 2:
        raise ValueError(
            f"{name}: expected segment_ids of queries and of keys, a tuple, or one for both; got a tuple of {len(both)}."
        )
    if both is not segment_ids:
        check(queries == keys, name, "segment_ids of queries and of keys, a tuple", queries=queries, keys=keys)
    ids = [jnp.asarray(x) for x in both]
    for x, size in zip(ids, (queries, keys), strict=True):
        fits = jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize <= 4
        check(
            fits and x.shape == (*batch, size),
            name,
            f"segment_ids to be int32 of shape {(*batch, size)}",
            segment_ids=x,
        )
    return {"query_segments": ids[0].astype(jnp.int32), "key_segments": ids[1].astype(jnp.int32)}


def _dropout(name: str, q: Array, keys: Size, dropout: AnyNumber, key: Any) -> tuple[Array | None, Array | None]:
    """The data of a key for each head, from which kernels compute what is kept; or, of other generators, what is kept."""
    if not dropout:
        return None, None
    try:
        if not jnp.issubdtype(jnp.asarray(key).dtype, jax.dtypes.prng_key):
            key = jax.random.wrap_key_data(jnp.asarray(key))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name}: expected key to be a key for each example, of jax.random.key; got {key!r} ({error})."
        ) from None
    batch, queries, heads = q.shape[:-3], q.shape[-3], q.shape[-2]
    check(key.shape == batch, name, f"a key for each example, of shape {batch}", key=key)
    per_head = jax.vmap(lambda key: jax.random.split(key, heads))(key.reshape(-1)).reshape(*batch, heads)
    config: Any = jax.config  # its options are made at run time
    plain = str(jax.random.key_impl(key)) == "threefry2x32" and config.jax_threefry_partitionable
    if plain and not config.jax_enable_x64:
        return jax.random.key_data(per_head), None
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - dropout, (queries, keys)))
    return None, keep(per_head.reshape(-1)).reshape(*batch, heads, queries, keys)


def places_of(name: str, batch: Sequence[Size], x: Any) -> tuple[int, int] | None:
    """`places` of an operand in `OPTIONAL`, of which an absent one has one for all."""
    return (1, 1) if x is None else places(batch, x.shape[: x.ndim - OWN_AXES[name]])


def places(batch: Sequence[Size], operand_batch: Sequence[Size]) -> tuple[int, int] | None:
    """Example `e` of a call has example `e // every % count` of an operand with the axes `operand_batch`: `every` and `count`.

    `None` if no such numbers do, as for the axes `(2, 1, 3)` of `(2, 4, 3)`.
    """
    operand_batch = (*[1] * (len(batch) - len(operand_batch)), *operand_batch)
    axes = [i for i, size in enumerate(operand_batch) if size != 1]
    if not axes:
        return 1, 1
    first, last = axes[0], axes[-1] + 1
    if operand_batch[first:last] != tuple(batch[first:last]):
        return None
    return math.prod(batch[last:]), math.prod(operand_batch)
