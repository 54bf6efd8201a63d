"""Scaled dot-product attention with grouped queries."""

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Integer

from ...core import AnyArray, AnyNumber, Keys, ShapeAndDtype, check, check_flags, integers, scale_of, soft_cap_of
from ...kernel import NativeKernel
from ...transform import Implementation, Op
from .._supports import floats
from . import _cudnn, _jax, _numpy, _triton
from ._of_pair import of_pair
from ._operands import FAR, OPTIONAL, OWN_AXES, Segments, Window, causal_window, check_keys, dropout_of, operands


_OPTIONS = ("causal", "scale", "window", "soft_cap", "dropout")
_NATIVE = NativeKernel("attention", attributes=(*_OPTIONS, "present"), supports=floats)
_NATIVE_BACKWARD = NativeKernel("attention_backward", attributes=(*_OPTIONS, "present", "needs_grad"), supports=floats)
# Keys and values are one argument, which is mapped as a whole.
_METHODS = {"q": "broadcast_all", "kv": "fold", **dict.fromkeys(OPTIONAL, "fold")}


def _sharding(q: ShapeAndDtype, kv: Sequence[ShapeAndDtype], *_: object, **__: object) -> str:
    """Examples, and heads with their keys."""
    h = "h" if kv[0].shape[-2] in (1, q.shape[-2]) else "(h _)"
    own = {1: h, 2: f"{h} _", 3: f"{h} _ _"}
    terms = ("_" if name.endswith("segments") else own.get(axes, "") for name, axes in OWN_AXES.items())
    optional = ", ".join(f"... {term}" for term in terms)
    return f"... _ {h} _, ... _ h _, ... _ h _, {optional} -> ... _ {h} _, ... _ {h}"


# The second result is the log-sum-exp of the logits, from which a gradient need not add up the exponentials again.
_attention = Op(
    "attention",
    kernels={
        "cpu": (_NATIVE, _numpy.ATTENTION),
        "cuda": (_cudnn.ATTENTION, _triton.ATTENTION, _jax.ATTENTION, _numpy.ATTENTION),
    },
    reference=of_pair,
    vmap_method=_METHODS,
    sharding=_sharding,
    backward={"cpu": _NATIVE_BACKWARD, "cuda": (_triton.ATTENTION_BACKWARD, _jax.ATTENTION_BACKWARD)},
)
# The same calls where the first result alone has a cotangent, and its gradients may be summed in any order.
_attention_in_any_order = dataclasses.replace(
    _attention,
    backward={
        "cpu": _NATIVE_BACKWARD,
        "cuda": (_cudnn.VALUE_BACKWARD, _triton.ATTENTION_BACKWARD, _jax.ATTENTION_BACKWARD),
    },
)


def attention(
    q: Float[AnyArray, "*batch queries heads size"],
    k: Float[AnyArray, "*batch keys kv_heads size"],
    v: Float[AnyArray, "*batch keys kv_heads v_size"],
    *,
    causal: bool = False,
    scale: AnyNumber | None = None,
    window: Window = None,
    soft_cap: AnyNumber | None = None,
    bias: Float[ArrayLike, "..."] | None = None,
    mask: Bool[ArrayLike, "..."] | None = None,
    alibi_slopes: Float[ArrayLike, "*#batch heads"] | None = None,
    segment_ids: Segments = None,
    lengths: Integer[ArrayLike, "*batch"] | None = None,
    offset: Integer[ArrayLike, "*batch"] | None = None,
    dropout: AnyNumber = 0.0,
    key: Keys | None = None,
    deterministic: bool = True,
    implementation: Implementation = "auto",
) -> Float[Array, "*batch queries heads v_size"]:
    r"""$\mathrm{softmax}(s\, q k^T)\, v$, computed in f32, without an array of queries times keys.

    **Arguments:**

    - `q`: queries, of shape `(*batch, queries, heads, size)`. f32, bf16 and f16 run the kernel, other dtypes the
        reference, or, of f64 on a GPU, XLA's products.
    - `k`, `v`: keys and values, of shape `(*batch, keys, kv_heads, size)`. `heads` is a multiple of `kv_heads`: query head `h`
        uses key/value head `h // (heads // kv_heads)`. Values may have another size than keys: the smaller ones are padded
        with zeros then.
    - `causal`: whether query `i`, which is at position `p = offset + i` among the keys, sees only the keys `j <= p`. A query
        that sees no key gives zeros, and its gradients are zero.
    - `scale`: $s$, by default $1 / \sqrt{\mathrm{size}}$.
    - `window`: a positive number: under `causal` a query sees the last `window` keys up to its own position, `p - window < j`,
        else those nearer than that on both sides, `abs(p - j) < window`. Or a tuple `(left, right)`, as FlashAttention has it:
        the keys with `p - left <= j <= p + right`. `left` may be `None`, and under `causal`, where nothing after `p` is
        seen, `right` too. By default all.
    - `soft_cap`: $c$: logits $l$ become $c \tanh(l / c)$, before what is added to them. By default they stay.
    - `bias`: added to the logits, of a shape that broadcasts to `(*batch, heads, queries, keys)`. Examples, heads and queries
        share it without a copy, as one of keys alone, `(*batch, 1, 1, keys)`. f32 or bf16 whatever `q` is. It may be `-inf`.
    - `mask`: bool, of a shape that broadcasts as that of `bias`, and is shared as it is; `True` where a key is seen.
    - `alibi_slopes`: $m_h$, of shape `(heads,)` or `(*batch, heads)`: $m_h |p - j|$ is subtracted from the logits.
    - `segment_ids`: int32 arrays of shape `(*batch, queries)` and `(*batch, keys)`, a tuple, or one for both: a query sees the
        keys of its own segment.
    - `lengths`: int32 of shape `batch` or `()`: only the keys `j < lengths` are seen. The others may be
        NaN, and the CPU's kernel does not read them.
    - `offset`: the position of the first query, int32 of shape `batch` or `()`, by default `keys - queries`, so that the last
        query is at the last key. Beyond 2^30 on both sides it is clamped.
    - `dropout`: the probability with which a weight becomes zero; the others are divided by `1 - dropout`. It is from 0 up
        to, and without, 1.
    - `key`: for `dropout`, a key for each example, of shape `batch`. The weights of head `h` that stay are those
        where `jax.random.bernoulli(jax.random.split(key, heads)[h], 1 - dropout, (queries, keys))` is true: the same as of
        `equinox.nn.MultiheadAttention`.
    - `deterministic`: whether two runs have the same bits. If not, the gradients of a call that cuDNN computes on a GPU are
        cuDNN's too, which are faster: it adds up the parts of a query's gradient in whatever order they are ready, so that the
        last bits differ from run to run. All else is as it is by default, on all platforms.
    - `implementation`: `"auto"` chooses; see [`eqxcallback.Op.using`][].

    **Returns:** an array of the shape and dtype of `q`, but for its last axis, which is that of `v`.

    A query sees a key only if `causal`, `window`, `mask`, `segment_ids` and `lengths` all allow it. A key that is not seen has
    a weight of zero, which does not hide a NaN or an infinity in its value; only `lengths` does.

    Memory, beside operands and results, is proportional to `queries + keys`, in the value and in its first and second
    derivatives. One exception is dropout with a key that is not of Threefry, or
    without `jax_threefry_partitionable`, or with `jax_enable_x64`: which weights stay is then an array of bools of
    shape `(*batch, heads, queries, keys)`. Another one is a `bias` or a `mask` of one key that stands for all,
    `(..., queries, 1)`. A `bias` has a gradient of its own size.

    On a GPU a kernel in Triton takes every option, and so do its gradients: products are of the dtype of `q` with sums in f32,
    where weights are rounded to that dtype before they multiply values. Blocks of keys that no query of a block sees are not
    read. 32 or fewer queries have their keys divided among programs, whose results are joined in a fixed order. For heads
    longer than 256 XLA multiplies there, with up to 1 GiB of logits in memory at a time. Where this process has a GPU with
    cuDNN, that takes the calls of 16 bits that it has a faster kernel for, `causal` and its `window` among them, if they are
    large: 30 billion operations. Their gradients are Triton's, and with `deterministic=False` cuDNN's. `implementation="triton"`
    asks for Triton in all of them.

    ??? cite

        [FlashAttention](https://arxiv.org/abs/2205.14135), [GQA](https://arxiv.org/abs/2305.13245),
        [ALiBi](https://arxiv.org/abs/2108.12409), [sliding windows](https://arxiv.org/abs/2004.05150),
        [soft capping](https://arxiv.org/abs/2408.00118)
    """
    return _attend(
        "attention",
        q,
        k,
        v,
        causal=causal,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        bias=bias,
        mask=mask,
        alibi_slopes=alibi_slopes,
        segment_ids=segment_ids,
        lengths=lengths,
        offset=offset,
        dropout=dropout,
        key=key,
        deterministic=deterministic,
        implementation=implementation,
    )[0]


class AttentionOptions(TypedDict, total=False):
    """The options of [`eqxcallback.ops.attention`][]."""

    causal: bool
    scale: AnyNumber | None
    window: Window
    soft_cap: AnyNumber | None
    bias: Float[ArrayLike, "..."] | None
    mask: Bool[ArrayLike, "..."] | None
    alibi_slopes: Float[ArrayLike, "..."] | None
    segment_ids: Segments
    lengths: Integer[ArrayLike, "..."] | None
    offset: Integer[ArrayLike, "..."] | None
    dropout: AnyNumber
    key: Keys | None
    deterministic: bool
    implementation: Implementation


def attention_with_lse(
    q: Float[AnyArray, "*batch queries heads size"],
    k: Float[AnyArray, "*batch keys kv_heads size"],
    v: Float[AnyArray, "*batch keys kv_heads v_size"],
    **options: Unpack[AttentionOptions],
) -> tuple[Float[Array, "*batch queries heads v_size"], Float[Array, "*batch queries heads"]]:
    r"""[`eqxcallback.ops.attention`][], and for each query the logarithm of the sum of the exponentials of its logits.

    Attention over parts of the keys is put together from both, as in a ring of devices, with a cache in pages, or with a prefix
    that several prompts share:

    ```python
    parts = [eqxcallback.ops.attention_with_lse(q, k, v) for k, v in ((k1, v1), (k2, v2))]
    out, lse = map(jnp.stack, zip(*parts))
    whole = (jax.nn.softmax(lse, axis=0)[..., None] * out).sum(axis=0)
    ```

    **Arguments:**

    - `q`, `k`, `v`, `options`: those of [`eqxcallback.ops.attention`][].

    **Returns:** a tuple of what it returns, and of an array of shape `(*batch, queries, heads)`, in f32, or in the dtype of `q`
    if that is wider. A query that sees no key has `-inf` there. `dropout` does not change it. Both have derivatives; JAX's
    `return_residual=True` has none.
    """
    if unknown := [name for name in options if name not in _KEYWORDS]:
        raise TypeError(f"attention_with_lse: expected options of attention; got {unknown[0]!r}.")
    return _attend("attention_with_lse", q, k, v, **options)


def _attend(
    name: str,
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    causal: bool = False,
    scale: AnyNumber | None = None,
    window: Window = None,
    soft_cap: AnyNumber | None = None,
    alibi_slopes: ArrayLike | None = None,
    offset: ArrayLike | None = None,
    dropout: AnyNumber = 0.0,
    key: Keys | None = None,
    deterministic: bool = True,
    implementation: Implementation = "auto",
    **more: Any,
) -> tuple[Array, Array]:
    """The result and the log-sum-exps."""
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    check(q.ndim >= 3, name, "q of shape (*batch, queries, heads, size)", q=q)
    check_keys(name, q, k, v, q.shape[:-3])
    check_flags(name, causal=causal, deterministic=deterministic)
    causal, kept_keys, ahead = causal_window(name, window, bool(causal), alibi_slopes is not None)
    options: dict[str, Any] = {
        "causal": causal,
        "scale": scale_of(name, scale, q.shape[-1]),
        "window": kept_keys,
        "soft_cap": soft_cap_of(name, soft_cap) or 0.0,
        "dropout": dropout_of(name, dropout, key),
    }
    if ahead:
        batch = q.shape[:-3]
        start = k.shape[-3] - q.shape[-3] if offset is None else offset
        offset = jnp.clip(integers(name, "offset", start, batch), -FAR, FAR) + ahead
    more |= {"alibi_slopes": alibi_slopes, "offset": offset, "dropout": dropout, "key": key}
    optional = operands(name, q, k.shape[-3], **more)
    size, v_size = q.shape[-1], v.shape[-1]
    q, k, v = (_padded(x, max(size, v_size)) for x in (q, k, v))
    # cuDNN takes no cotangent of the log-sum-exp.
    is_for_cudnn = not deterministic and name == "attention" and implementation != "triton"
    op = _attention_in_any_order if is_for_cudnn else _attention
    out, lse = op.using(implementation)(q, (k, v), *optional.values(), **options)
    return out if v_size == out.shape[-1] else out[..., :v_size], lse


_KEYWORDS = {name for name, p in inspect.signature(attention).parameters.items() if p.kind == p.KEYWORD_ONLY}


def _padded(x: Array, size: int) -> Array:
    return x if x.shape[-1] == size else jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])
