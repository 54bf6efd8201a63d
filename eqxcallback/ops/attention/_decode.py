"""The attention of one new token over a cache."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int8, Integer

from ...core import AnyArray, AnyInt, AnyNumber, ShapeAndDtype, check, check_floats, integers, scale_of, soft_cap_of
from ...kernel import NativeKernel
from ...transform import Implementation, Op
from .._precision import wide
from .._supports import floats
from . import _cuda, _cuda_decode_backward, _cuda_decode_mma, _jax, _numpy, _reference
from ._operands import check_keys, slopes_of, window_of


def _of_pair(
    q: Array,
    kv: Sequence[Array],
    length: Array,
    alibi_slopes: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    **options: Any,
) -> Array:
    """Calls the reference of the op, of which keys and values are one argument."""
    return _reference.decode_attention(q, kv[0], kv[1], length, alibi_slopes, k_scale, v_scale, **options)


def _sharding(q: ShapeAndDtype, kv: Sequence[ShapeAndDtype], *_: object, **__: object) -> str:
    """Examples, and heads with their keys."""
    h = "h" if kv[0].shape[-2] in (1, q.shape[-2]) else "(h _)"
    return f"... {h} _, ... _ h _, ... _ h _, ..., ... {h}, ... _ h, ... _ h -> ... {h} _"


_NATIVE = NativeKernel("decode_attention", attributes=("scale", "window", "soft_cap", "present"), supports=floats)
# Keys and values are one argument, which is mapped as a whole.
_decode_attention = Op(
    "decode_attention",
    kernels={
        "cpu": (_NATIVE, _numpy.DECODE_ATTENTION),
        "cuda": (
            _cuda_decode_mma.DECODE_ATTENTION_OF_LARGE_CACHES,
            _cuda.DECODE_ATTENTION,
            _jax.DECODE_ATTENTION,
            _numpy.DECODE_ATTENTION,
        ),
    },
    reference=_of_pair,
    backward={"cuda": (_cuda_decode_backward.DECODE_ATTENTION_BACKWARD, _jax.DECODE_ATTENTION_BACKWARD)},
    backward_reads_results=False,
    vmap_method={
        "q": "broadcast_all",
        **dict.fromkeys(("kv", "length", "alibi_slopes", "k_scale", "v_scale"), "fold"),
    },
    sharding=_sharding,
)


def decode_attention(
    q: Float[AnyArray, "*batch heads size"],
    k: Float[AnyArray, "*batch keys kv_heads size"] | Int8[AnyArray, "*batch keys kv_heads size"],
    v: Float[AnyArray, "*batch keys kv_heads size"] | Int8[AnyArray, "*batch keys kv_heads size"],
    length: Integer[ArrayLike, "*batch"],
    *,
    scale: AnyNumber | None = None,
    window: AnyInt | None = None,
    soft_cap: AnyNumber | None = None,
    alibi_slopes: Float[ArrayLike, "*#batch heads"] | None = None,
    k_scale: Float[AnyArray, "*batch keys kv_heads"] | None = None,
    v_scale: Float[AnyArray, "*batch keys kv_heads"] | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "*batch heads size"]:
    """The attention of one new token over the first `length` entries of a cache. Its time follows `length`, not `keys`.

    **Arguments:**

    - `q`: the token's queries, of shape `(*batch, heads, size)`. f32, bf16 and f16 run the kernel, other dtypes the
        reference, or, of f64 on a GPU, XLA's products.
    - `k`, `v`: the cache, of shape `(*batch, keys, kv_heads, size)`, as in [`eqxcallback.ops.attention`][].
    - `length`: how many entries are filled, int32 of shape `batch` or `()`. Clamped to `0 .. keys`. The token itself is the
        last of them.
    - `scale`: by default $1 / \\sqrt{\\mathrm{size}}$.
    - `window`: a positive number: only the last `window` of the entries are seen, and read. By default all.
    - `soft_cap`, `alibi_slopes`: as in [`eqxcallback.ops.attention`][].
    - `k_scale`, `v_scale`: of a cache in int8, of shape `(*batch, keys, kv_heads)`: an entry is the integers times its scale.
        They are dequantised in the kernel's registers.
    - `implementation`: `"auto"` chooses; see [`eqxcallback.Op.using`][].

    **Returns:** an array of the shape and dtype of `q`, zeros where `length` is 0.
    """
    name = "decode_attention"
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    check(q.ndim >= 2, name, "q of shape (*batch, heads, size)", q=q)
    batch = q.shape[:-2]
    scales = {name: x for name, x in (("k_scale", k_scale), ("v_scale", v_scale)) if x is not None}
    if len(scales) == 1:
        raise ValueError(f"{name}: expected both k_scale and v_scale, or none; got {', '.join(scales)}.")
    check_keys(name, q, k, v, batch, int8=bool(scales))
    check(k.shape == v.shape, name, "k and v of one shape", k=k, v=v)
    length = integers(name, "length", length, batch)
    slopes = None if alibi_slopes is None else slopes_of(name, alibi_slopes, q, batch, q.shape[-2])
    options: dict[str, Any] = {
        "scale": scale_of(name, scale, q.shape[-1]),
        "window": window_of(name, window),
        "soft_cap": soft_cap_of(name, soft_cap) or 0.0,
    }
    arrays = {name: jnp.asarray(x) for name, x in scales.items()}
    if arrays:
        check_floats(name, **arrays)
        fits = all(x.shape == k.shape[:-1] for x in arrays.values())
        check(fits, name, f"k_scale and v_scale of shape {k.shape[:-1]}", **arrays)
    k_scale, v_scale = (x.astype(wide(q.dtype)) for x in arrays.values()) if arrays else (None, None)
    return _decode_attention.using(implementation)(q, (k, v), length, slopes, k_scale, v_scale, **options)
