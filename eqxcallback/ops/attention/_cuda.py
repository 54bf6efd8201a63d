"""The attention of one token over a cache. See decode.cu."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...core import ShapeAndDtype, Types, type_text
from ...kernel import CudaKernel, Launch
from .._cuda import FOLDER, ceil, multiprocessors, name, pack
from .._supports import floats
from ._operands import places_of


# The longest head that the lanes that share a row have registers for, and that of a cache in int8, with slopes or a soft cap.
_MAX_SIZE, _MAX_SIZE_WITH_OPTIONS = 1024, 512

# A part has at least as many keys: what a block has on their way at a time.
_MIN_PART_KEYS = 32


def _batch(q: ShapeAndDtype) -> int:
    return math.prod(q.shape[:-2])


def _shape(q: ShapeAndDtype, kv: Sequence[ShapeAndDtype]) -> tuple[int, int, int]:
    """Columns that a lane has, whether rows are whole packs, and the heads that share what a block reads."""
    heads, size = q.shape[-2:]
    columns = 16 if size <= 512 else 32
    packed = size % pack(kv[0]) == 0
    group = heads // kv[0].shape[-2]
    # Long rows, and rows that are not packs, have registers for two heads.
    block_heads = 2 if columns == 32 or not packed else 4 if group > 2 else max(group, 1)
    # With four, half as many columns leave registers for four blocks, not two. A pack of int8 has 16.
    if block_heads == 4 and size <= 256 and kv[0].dtype.itemsize > 1:
        columns = 8
    return columns, packed, block_heads


def _block_heads(q: ShapeAndDtype, kv: Sequence[ShapeAndDtype]) -> int:
    return _shape(q, kv)[2]


def groups_of(q: ShapeAndDtype, kv: Sequence[ShapeAndDtype], block_heads: int) -> int:
    kv_heads = kv[0].shape[-2]
    return _batch(q) * kv_heads * ceil(q.shape[-2] // kv_heads, block_heads)


def parts_of(q: ShapeAndDtype, kv: Sequence[ShapeAndDtype], resident_blocks: int, block_heads: int) -> int:
    """Into how many parts the keys of an example are divided, so that all multiprocessors have what they run at a time."""
    blocks = resident_blocks * multiprocessors()
    return max(1, min(blocks // max(groups_of(q, kv, block_heads), 1), ceil(kv[0].shape[-3], _MIN_PART_KEYS)))


def of_pairs(alibi_slopes: ShapeAndDtype | None, soft_cap: float) -> bool:
    return alibi_slopes is not None or soft_cap > 0


def _entry(
    q: ShapeAndDtype,
    kv: Sequence[ShapeAndDtype],
    length: ShapeAndDtype,
    alibi_slopes: ShapeAndDtype | None = None,
    *_: object,
    soft_cap: float = 0.0,
    **__: object,
) -> str:
    columns, packed, block_heads = _shape(q, kv)
    more = of_pairs(alibi_slopes, soft_cap)
    return name("decode_attention", q, CudaKernel.ctype(kv[0].dtype), block_heads, columns, packed, more)


def workspaces_of(q: ShapeAndDtype, parts: int) -> list[jax.ShapeDtypeStruct]:
    sums = (_batch(q), q.shape[-2], parts)
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (sums, sums, (*sums, q.shape[-1]))]


def joining_blocks(q: ShapeAndDtype) -> int:
    return _batch(q) * q.shape[-2] * ceil(q.shape[-1], 32)


def join_entry(q: ShapeAndDtype, kv: Sequence[ShapeAndDtype], *_: object, **__: object) -> str:
    return name("decode_attention_join", q, CudaKernel.ctype(kv[0].dtype))


def _parts_of_call(
    q: ShapeAndDtype, kv: Sequence[ShapeAndDtype], *_: object, resident_blocks: int, **__: object
) -> int:
    return parts_of(q, kv, resident_blocks, _block_heads(q, kv))


def _grid(q: ShapeAndDtype, kv: Sequence[ShapeAndDtype], *_: object, resident_blocks: int, **__: object) -> int:
    return groups_of(q, kv, _block_heads(q, kv)) * parts_of(q, kv, resident_blocks, _block_heads(q, kv))


def _places_of_slopes(
    q: ShapeAndDtype,
    kv: Sequence[ShapeAndDtype],
    length: ShapeAndDtype,
    alibi_slopes: ShapeAndDtype | None = None,
    *_: object,
) -> tuple[int, int]:
    places = places_of("alibi_slopes", q.shape[:-2], alibi_slopes)
    assert places is not None  # or the call is not supported
    return places


def supports_decode(types: Types, **options: Any) -> bool | str:
    has_options = types.k_scale is not None or of_pairs(types.alibi_slopes, options["soft_cap"])
    most = _MAX_SIZE_WITH_OPTIONS if has_options else _MAX_SIZE
    if types.q.shape[-1] > most:
        of_which = " with a cache in int8, ALiBi slopes or a soft cap" if has_options else ""
        return f"heads have to be no longer than {most}{of_which}; they are {types.q.shape[-1]}"
    slopes, scales, cache = types.alibi_slopes, types.k_scale, types.kv[0]
    if places_of("alibi_slopes", types.q.shape[:-2], slopes) is None:
        return f"alibi_slopes have a batch axis of 1 between others: they are {type_text(slopes.dtype, slopes.shape)}"
    if scales is not None and not scales.shape == types.v_scale.shape == cache.shape[:-1]:
        return f"scales have to have the batch axes of the cache, {cache.shape[:-1]}; they are {scales.shape}"
    return floats(types, **options)


# Scalars of all kernels.
SIZES = {
    "batch": lambda q, *_, **__: _batch(q),
    "kv_batch": lambda q, kv, *_, **__: math.prod(kv[0].shape[:-3]),
    "length_batch": lambda q, kv, length, *_, **__: length.size,
    "keys": lambda q, kv, *_, **__: kv[0].shape[-3],
    "heads": lambda q, *_, **__: q.shape[-2],
    "kv_heads": lambda q, kv, *_, **__: kv[0].shape[-2],
    "size": lambda q, *_, **__: q.shape[-1],
}
SLOPES = {
    "slopes_every": lambda *args, **_: _places_of_slopes(*args)[0],
    "slopes_batch": lambda *args, **_: _places_of_slopes(*args)[1],
}


DECODE_ATTENTION = CudaKernel(
    FOLDER / "attention" / "decode.cu",
    _entry,
    [
        Launch(
            grid=_grid,
            block=128,
            shared_bytes=lambda q, kv, *_, **__: (q.shape[-1] + 2) * 16,
        ),
        Launch(
            grid=lambda q, *_, **__: joining_blocks(q),
            block=(32, 8),
            entry=join_entry,
        ),
    ],
    scalars={
        **{of: ("int64", size) for of, size in SIZES.items()},
        "parts": ("int64", _parts_of_call),
        **{of: ("int64", place) for of, place in SLOPES.items()},
        "window": "int64",
        "scale": "float32",
        "soft_cap": "float32",
    },
    workspaces=lambda q, *args, **options: workspaces_of(q, _parts_of_call(q, *args, **options)),
    asks_resident_blocks=True,
    supports=supports_decode,
)
