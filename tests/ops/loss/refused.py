"""The calls that the functions refuse, and what they say."""

import jax.numpy as jnp

from eqxcallback import ops

from ..zeros import f32, i32


REFUSED = [
    (
        lambda: ops.softmax_cross_entropy(f32(3), i32(), label_smoothing="a"),  # pyright: ignore[reportArgumentType]
        r"softmax_cross_entropy: expected label_smoothing from 0 to 1; got 'a'\.",
    ),
    (
        lambda: ops.softmax_cross_entropy(f32(3), i32(), z_loss="1"),  # pyright: ignore[reportArgumentType]
        r"softmax_cross_entropy: expected z_loss to be a number; got '1'\.",
    ),
    (
        lambda: ops.softmax_cross_entropy(f32(3), i32(), ignore_index=1.5),  # pyright: ignore[reportArgumentType]
        r"softmax_cross_entropy: expected ignore_index to be an integer or None; got 1\.5\.",
    ),
    (
        lambda: ops.softmax_cross_entropy(f32(3), i32(), ignore_index=True),
        r"softmax_cross_entropy: expected ignore_index to be an integer or None; got True\.",
    ),
    (
        lambda: ops.linear_cross_entropy(f32(3), f32(5, 3), i32(), ignore_index="1"),  # pyright: ignore[reportArgumentType]
        r"linear_cross_entropy: expected ignore_index to be an integer or None; got '1'\.",
    ),
    (
        lambda: ops.softmax_cross_entropy(jnp.ones(3), 1, label_smoothing=1.5),
        r"softmax_cross_entropy: expected label_smoothing from 0 to 1; got 1.5\.",
    ),
    (
        lambda: ops.linear_cross_entropy(jnp.ones(3), jnp.ones((2, 3)), 1, label_smoothing=-1),
        r"linear_cross_entropy: expected label_smoothing from 0 to 1; got -1\.",
    ),
    (
        lambda: ops.linear_cross_entropy(jnp.ones(3), jnp.ones((2, 4)), 1),
        r"linear_cross_entropy: expected weight of shape \(size, in_features\) for the last axis of x; got x: float32\[3\]",
    ),
    (
        lambda: ops.linear_cross_entropy(jnp.ones(3), jnp.ones((2, 3), jnp.bfloat16), 1),
        r"linear_cross_entropy: expected x, weight of one floating dtype",
    ),
    (
        lambda: ops.linear_cross_entropy(jnp.ones(3), jnp.ones((2, 3)), 1, bias=jnp.ones(3)),
        r"linear_cross_entropy: expected bias of shape \(size,\); got bias: float32\[3\]",
    ),
    (
        lambda: ops.linear_cross_entropy(jnp.ones(3), jnp.ones((2, 3)), 1, soft_cap=0.0),
        r"linear_cross_entropy: expected soft_cap to be a positive number or None; got 0.0",
    ),
    (
        lambda: ops.linear_cross_entropy(jnp.ones(3), jnp.ones((2, 3)), 1, reduction="max"),  # pyright: ignore[reportArgumentType]
        r"linear_cross_entropy: expected reduction to be one of \('none', 'mean', 'sum'\); got 'max'\.",
    ),
    (
        lambda: ops.linear_cross_entropy(jnp.ones((4, 3)), jnp.ones((2, 3)), jnp.zeros(3, jnp.int32)),
        r"linear_cross_entropy: expected labels to be integers of shape \(\) or \(4,\)",
    ),
]
