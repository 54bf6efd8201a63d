"""Attention over a sequence that is split over devices: keys and values go round, and each device keeps its queries.

[Ring attention](https://arxiv.org/abs/2310.01889). No device ever has more than two slices of keys and values, in the forward
pass and in the backward pass.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import eqxcallback as eqxc


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def ring_attention(
    q: Float[Array, "S heads size"],
    k: Float[Array, "S kv_heads size"],
    v: Float[Array, "S kv_heads size"],
    axis: str,
    causal: bool = True,
) -> Float[Array, "S heads size"]:
    """`eqxcallback.ops.attention` of a whole sequence, in a `shard_map` that splits it.

    **Arguments:**

    - `q`, `k`, `v`: this device's slice of the sequence, with as many tokens as all others have.
    - `axis`: of the mesh, along which the sequence is split, in order.
    - `causal`: whether a token sees itself and those before it alone, or all.

    **Returns:** the result for this device's queries.

    A slice whose keys no query sees is not read. The devices that have the end of a causal sequence see the most, and the others
    wait for them.
    """
    return _forward(q, k, v, axis, causal)[0]


def go_round(
    attend: Callable[[int, Array, Array], tuple[Array, Array]], k: Array, v: Array, axis: str
) -> tuple[Float[Array, "S heads size"], Float[Array, "S heads"]]:
    """Attention to the keys and values of all devices.

    **Arguments:**

    - `attend`: a function of keys and values, and of how many places before this device the one is that they are of. It returns
        the result, in f32, and the log-sum-exp of the logits.
    - `k`, `v`: this device's.

    **Returns:** what `attend` returns, for the keys of all.
    """
    out, lse = attend(0, k, v)
    for step in range(1, jax.lax.axis_size(axis)):
        k, v = _pass_on((k, v), axis, 1)
        other, other_lse = attend(step, k, v)
        both = jnp.logaddexp(lse, other_lse)
        out = _weight(lse, both) * out + _weight(other_lse, both) * other
        lse = both
    return out, lse


def _forward(q: Array, k: Array, v: Array, axis: str, causal: bool) -> tuple[Array, tuple[Array, ...]]:
    out, lse = go_round(lambda step, k, v: _attend(q, k, v, step, axis, causal), k, v, axis)
    return out.astype(q.dtype), (q, k, v, out, lse)


def _backward(axis: str, causal: bool, saved: tuple[Array, ...], cotangent: Array) -> tuple[Array, Array, Array]:
    """The gradients. Those of a slice travel with it, and are home after the last step.

    Slices go round the other way: if they came in the same order again, XLA would keep all of the forward pass.
    """
    q, k, v, out, lse = saved
    slices, of_q, of_slices = (
        (k, v),
        jnp.zeros(q.shape, jnp.float32),
        tuple(jnp.zeros(x.shape, jnp.float32) for x in (k, v)),
    )
    for step in range(jax.lax.axis_size(axis)):
        if step:
            slices, of_slices = _pass_on((slices, of_slices), axis, -1)

        def attend(q: Array, k: Array, v: Array, step: int = step) -> tuple[Array, Array]:
            return _attend(q, k, v, -step, axis, causal)

        (part, part_lse), pullback = jax.vjp(attend, q, *slices)
        # The whole is the mean of the parts with weights `exp(part_lse - lse)`.
        weighted = _weight(part_lse, lse) * cotangent.astype(jnp.float32)
        of_lse = (weighted * (part - out)).sum(axis=-1)
        more_of_q, *more = pullback((weighted, of_lse))
        of_q += more_of_q.astype(jnp.float32)
        of_slices = tuple(x + y.astype(jnp.float32) for x, y in zip(of_slices, more, strict=True))
    of_k, of_v = _pass_on(of_slices, axis, -1)
    return of_q.astype(q.dtype), of_k.astype(k.dtype), of_v.astype(v.dtype)


ring_attention.defvjp(_forward, _backward)


def _attend(q: Array, k: Array, v: Array, step: int, axis: str, causal: bool) -> tuple[Array, Array]:
    """Attend to the slice of the device `step` places before, in f32, with the log-sum-exp of the logits."""
    options: dict[str, Any] = {}
    if causal:
        index = jax.lax.axis_index(axis)
        source = (index - step) % jax.lax.axis_size(axis)
        options = {"causal": True, "offset": (index - source) * len(k)}
    out, lse = eqxc.ops.attention_with_lse(q, k, v, **options)
    return out.astype(jnp.float32), lse


def _weight(part: Float[Array, "S heads"], whole: Float[Array, "S heads"]) -> Float[Array, "S heads 1"]:
    """Return the share of a part in the whole: nothing where it sees no key."""
    return jnp.exp(part - whole)[..., None]


def _pass_on(arrays: Any, axis: str, places: int) -> Any:
    count = jax.lax.axis_size(axis)
    return jax.lax.ppermute(arrays, axis, [(i, (i + places) % count) for i in range(count)])
