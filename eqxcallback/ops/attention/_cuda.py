"""The attention of one token over a cache. See decode.cu."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from ...kernel import CudaKernel, Launch
from .._cuda import FOLDER, ceil, multiprocessors, name, pack
from .._supports import floats


# The longest head that the lanes that share a row have registers for.
_MAX_SIZE = 1024

# A part has at least as many keys.
_MIN_PART_KEYS = 64


def _batch(q: Any) -> int:
    return math.prod(q.shape[:-2])


def _shape(q: Any, kv: Any) -> tuple[int, int, int]:
    """Columns that a lane has, whether rows are whole packs, and the heads that share what a block reads."""
    heads, size = q.shape[-2:]
    columns = 16 if size <= 512 else 32
    packed = size % pack(q) == 0
    group = heads // kv[0].shape[-2]
    block_heads = 2 if columns == 32 else 4 if not packed or group > 2 else max(group, 1)
    return columns, packed, block_heads


def _groups(q: Any, kv: Any) -> int:
    kv_heads = kv[0].shape[-2]
    return _batch(q) * kv_heads * ceil(q.shape[-2] // kv_heads, _shape(q, kv)[2])


def _parts(q: Any, kv: Any) -> int:
    """Into how many parts the keys of an example are divided, so that all multiprocessors have four blocks."""
    return max(1, min(4 * multiprocessors() // max(_groups(q, kv), 1), ceil(kv[0].shape[-3], _MIN_PART_KEYS)))


def _entry(q: Any, kv: Any, *_: Any, **__: Any) -> str:
    columns, packed, block_heads = _shape(q, kv)
    return name("decode_attention", q, block_heads, columns, packed)


def _workspaces(q: Any, kv: Any, *_: Any, **__: Any) -> list[jax.ShapeDtypeStruct]:
    sums = (_batch(q), q.shape[-2], _parts(q, kv))
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (sums, sums, (*sums, q.shape[-1]))]


def _joining_blocks(q: Any, *_: Any, **__: Any) -> int:
    return _batch(q) * q.shape[-2] * ceil(q.shape[-1], 32)


_WORDS = {
    "alibi_slopes": "ALiBi slopes",
    "k_scale": "cache in int8",
    "v_scale": "cache in int8",
    "soft_cap": "soft cap",
}


def _supports(types: Any, **options: Any) -> bool | str:
    # A window or a soft cap of 0 is none.
    more = {**types._asdict(), "window": options["window"] or None, "soft_cap": options["soft_cap"] or None}
    known = ("q", "kv", "length")
    lacking = [_WORDS.get(name, name) for name, value in more.items() if value is not None and name not in known]
    if lacking:
        return f"it has no {lacking[0]}"
    if types.q.shape[-1] > _MAX_SIZE:
        return f"heads have to be no longer than {_MAX_SIZE}; they are {types.q.shape[-1]}"
    return floats(types, **options)


DECODE_ATTENTION = CudaKernel(
    FOLDER / "attention" / "decode.cu",
    _entry,
    [
        Launch(
            grid=lambda q, kv, *_, **__: _groups(q, kv) * _parts(q, kv),
            block=128,
            shared_bytes=lambda q, kv, *_, **__: (q.shape[-1] + 2) * 16,
        ),
        Launch(
            grid=_joining_blocks,
            block=(32, 8),
            entry=lambda q, kv, *_, **__: name("decode_attention_join", q),
        ),
    ],
    scalars={
        "batch": ("int64", lambda q, kv, *_, **__: _batch(q)),
        "kv_batch": ("int64", lambda q, kv, *_, **__: math.prod(kv[0].shape[:-3])),
        "length_batch": ("int64", lambda q, kv, length, *_, **__: length.size),
        "keys": ("int64", lambda q, kv, *_, **__: kv[0].shape[-3]),
        "heads": ("int64", lambda q, kv, *_, **__: q.shape[-2]),
        "kv_heads": ("int64", lambda q, kv, *_, **__: kv[0].shape[-2]),
        "size": ("int64", lambda q, kv, *_, **__: q.shape[-1]),
        "parts": ("int64", lambda q, kv, *_, **__: _parts(q, kv)),
        "scale": "float32",
    },
    workspaces=_workspaces,
    supports=_supports,
)
