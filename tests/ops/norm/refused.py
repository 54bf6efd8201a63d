"""The calls that the functions refuse, and what they say."""

import jax.numpy as jnp

from eqxcallback import ops

from ..zeros import c64, f32, i32


F32, INT = jnp.ones((2, 4)), jnp.ones((2, 4), jnp.int32)

REFUSED = [
    (lambda: ops.rms_norm(i32(3)), r"rms_norm: expected x of one floating dtype; got x: int32\[3\]"),
    (lambda: ops.rms_norm(c64(3)), r"x of one floating dtype; got x: complex64\[3\]"),
    (lambda: ops.rms_norm(f32()), r"rms_norm: expected x with at least one axis; got x: float32\[\]"),
    (
        lambda: ops.rms_norm(f32(2, 3), f32(2)),
        r"rms_norm: expected weight of the shape of the last axis of x; got weight: float32\[2\], x: float32\[2,3\]",
    ),
    (
        lambda: ops.rms_norm(f32(2, 3), c64(3)),
        r"rms_norm: expected weight of one floating dtype; got weight: complex64",
    ),
    (lambda: ops.layer_norm(f32(2, 3), f32(3), i32(3)), r"layer_norm: expected bias of one floating dtype; got bias"),
    (lambda: ops.add_rms_norm(f32(3), f32(3), i32(3)), r"add_rms_norm: expected weight of one floating dtype"),
    (lambda: ops.group_norm(F32, i32(2), groups=2), r"group_norm: expected weight of one floating dtype"),
    (lambda: ops.rms_norm(f32(2, 3), f32(1, 3)), r"weight of the shape of the last axis"),
    (lambda: ops.rms_norm(f32(2, 3), f32()), r"weight of the shape of the last axis"),
    (
        lambda: ops.rms_norm(f32(2), eps="a"),  # pyright: ignore[reportArgumentType]
        r"rms_norm: expected eps to be a number; got 'a'\.",
    ),
    (
        lambda: ops.layer_norm(f32(2), eps=None),  # pyright: ignore[reportArgumentType]
        r"layer_norm: expected eps to be a number; got None\.",
    ),
    (
        lambda: ops.add_rms_norm(f32(2), f32(2), eps=1j),  # pyright: ignore[reportArgumentType]
        r"add_rms_norm: expected eps to be a number; got 1j\.",
    ),
    (lambda: ops.group_norm(INT, groups=2), r"group_norm: expected x of one floating dtype"),
    (lambda: ops.group_norm(F32[0], groups=2), r"group_norm: expected x of shape \(\*batch, channels, size\)"),
    (lambda: ops.group_norm(F32.T, groups=3), r"group_norm: expected groups to be a divisor of the channels of x; got"),
    (lambda: ops.group_norm(F32, groups=0), r"group_norm: expected groups to be a positive integer; got 0\."),
    (lambda: ops.group_norm(F32, groups=2.0), r"group_norm: expected groups to be a positive integer; got 2\.0\."),  # pyright: ignore[reportArgumentType]
    (lambda: ops.group_norm(F32, groups=2, eps="a"), r"group_norm: expected eps to be a number; got 'a'\."),  # pyright: ignore[reportArgumentType]
    (lambda: ops.group_norm(F32, F32[0], groups=2), r"group_norm: expected weight of shape \(channels,\); got weight"),
    (lambda: ops.group_norm(F32, None, F32[0], groups=2), r"group_norm: expected bias of shape \(channels,\)"),
]
