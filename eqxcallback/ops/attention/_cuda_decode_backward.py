"""Gradients of the attention of one token over a cache. See decode_backward.cu."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...core import PyTree, ShapeAndDtype, Types
from ...kernel import CudaKernel, Launch
from .._cuda import FOLDER, ceil, name, pack
from ._cuda import (
    SIZES,
    SLOPES,
    groups_of,
    parts_of,
    supports_decode,
)


# Where more query heads share keys, arithmetic takes longer than what XLA's products read and write more. Of long heads it is
# fewer, because up to half of the columns of 32 lanes are none of a row.
_MAX_GROUP, _MAX_GROUP_OF_LONG, _LONG = 8, 4, 256
_THREADS = 128


def _columns(q: ShapeAndDtype, kv: Sequence[ShapeAndDtype]) -> int:
    """Return the columns that a lane has: 32 lanes have a row, and a pack of int8 has 16."""
    size = q.shape[-1]
    return 32 if size > 512 else 16 if size > 256 or kv[0].dtype == jnp.int8 else 8


def _is_packed(q: ShapeAndDtype, kv: Sequence[ShapeAndDtype]) -> bool:
    return q.shape[-1] % pack(kv[0]) == 0


def _block_heads(q: ShapeAndDtype, kv: Sequence[ShapeAndDtype]) -> int:
    """Return the query heads that share what a block reads, as many as there are registers for."""
    group, columns = q.shape[-2] // kv[0].shape[-2], _columns(q, kv)
    # A row of 16 columns that is not packs has too few for three blocks.
    least = 1 if columns == 8 or _is_packed(q, kv) else 2
    return min(max(4 if group > 2 else group, least), 32 // columns)


def _of_args(function: Any) -> Any:
    """A function of the op's arguments, as one of what a backward kernel's functions are called with."""

    def of(grads: PyTree, args: PyTree, *_: object, **options: Any) -> Any:
        return function(*args, **options)

    return of


def _parts(q: ShapeAndDtype, kv: Sequence[ShapeAndDtype], *_: object, resident_blocks: int, **__: object) -> int:
    return parts_of(q, kv, resident_blocks, _block_heads(q, kv))


def _grid(q: ShapeAndDtype, kv: Sequence[ShapeAndDtype], *args: Any, **options: Any) -> int:
    return groups_of(q, kv, _block_heads(q, kv)) * _parts(q, kv, *args, **options)


def _name(kernel: str, q: ShapeAndDtype, kv: Sequence[ShapeAndDtype], *more: bool | int) -> str:
    return name(f"decode_attention_backward{kernel}", q, CudaKernel.ctype(kv[0].dtype), *more)


def _shape(q: ShapeAndDtype, kv: Sequence[ShapeAndDtype], slopes: object, soft_cap: float) -> tuple[int | bool, ...]:
    return _columns(q, kv), _is_packed(q, kv), slopes is not None or soft_cap > 0, slopes is not None


def _entry(
    q: ShapeAndDtype,
    kv: Sequence[ShapeAndDtype],
    length: object,
    slopes: object,
    *_: object,
    soft_cap: float,
    **__: object,
) -> str:
    return _name("", q, kv, _block_heads(q, kv), *_shape(q, kv, slopes, soft_cap))


def _join_entry(
    q: ShapeAndDtype, kv: Sequence[ShapeAndDtype], length: object, slopes: object, *_: object, **__: object
) -> str:
    return _name("_join", q, kv, slopes is not None)


def _keys_entry(
    q: ShapeAndDtype,
    kv: Sequence[ShapeAndDtype],
    length: object,
    slopes: object,
    *_: object,
    soft_cap: float,
    **__: object,
) -> str:
    return _name("_keys", q, kv, *_shape(q, kv, slopes, soft_cap))


def _keys_grid(grads: PyTree, args: PyTree, *_: object, **__: object) -> int:
    _, d_kv, _, _, d_k_scale, d_v_scale = grads
    if all(gradient is None for gradient in (*(d_kv or ()), d_k_scale, d_v_scale)):
        return 0
    q, kv = args[:2]
    *batch, keys, kv_heads, size = kv[0].shape
    columns = _columns(q, kv)
    lanes = 1 << (ceil(max(size, 1), columns) - 1).bit_length()
    steps = 4 if kv[0].dtype == jnp.int8 else 32 // columns
    return math.prod(batch) * kv_heads * ceil(keys, steps * _THREADS // lanes)


def _slopes_grid(grads: PyTree, *_: object, **__: object) -> int:
    return 0 if grads[3] is None else ceil(grads[3].size, _THREADS)


def _slopes_entry(grads: PyTree, args: PyTree, *_: object, **__: object) -> str:
    # What is not launched need not be compiled: the image has the other kernel anyway.
    return _join_entry(*args) if grads[3] is None else _name("_slopes", *args[:2])


def _of_part(slopes: object) -> int:
    """Return how many numbers there are for a part of the keys, beside those of columns."""
    return 3 if slopes is None else 5


def _shared_bytes(q: ShapeAndDtype, kv: object, length: object, slopes: object, *_: object, **__: object) -> int:
    return (2 * q.shape[-1] + _of_part(slopes)) * 16


def _workspaces(
    q: ShapeAndDtype, kv: Any, length: object, slopes: object, *args: Any, **options: Any
) -> list[jax.ShapeDtypeStruct]:
    parts, rows = _parts(q, kv, *args, **options), math.prod(q.shape[:-1])
    shapes = (rows, parts, _of_part(slopes)), (rows, parts, 2, q.shape[-1]), (rows, 3 if slopes is None else 4)
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def _supports(types: Types, **options: object) -> bool | str:
    group, is_long = types.q.shape[-2] // max(types.kv[0].shape[-2], 1), types.q.shape[-1] > _LONG
    most = _MAX_GROUP_OF_LONG if is_long else _MAX_GROUP
    if group > most:
        heads = f"heads of q longer than {_LONG}" if is_long else "heads of q"
        return f"no more than {most} {heads} may share those of the cache; {group} do"
    return supports_decode(types, **options)


DECODE_ATTENTION_BACKWARD = CudaKernel(
    FOLDER / "attention" / "decode_backward.cu",
    _of_args(_entry),
    [
        Launch(
            grid=_of_args(_grid),
            block=_THREADS,
            shared_bytes=_of_args(_shared_bytes),
        ),
        Launch(
            # Heads without columns have sums, too.
            grid=_of_args(lambda q, *_, **__: math.prod(q.shape[:-1]) * max(ceil(q.shape[-1], 32), 1)),
            block=(32, 8),
            entry=_of_args(_join_entry),
        ),
        Launch(
            grid=_keys_grid,
            block=_THREADS,
            entry=_of_args(_keys_entry),
        ),
        Launch(
            grid=_slopes_grid,
            block=_THREADS,
            entry=_slopes_entry,
        ),
    ],
    scalars={
        **{of: ("int64", _of_args(size)) for of, size in SIZES.items()},
        "parts": ("int64", _of_args(_parts)),
        **{of: ("int64", _of_args(place)) for of, place in SLOPES.items()},
        "window": "int64",
        "scale": "float32",
        "soft_cap": "float32",
    },
    workspaces=_of_args(_workspaces),
    asks_resident_blocks=True,
    supports=_supports,
)
