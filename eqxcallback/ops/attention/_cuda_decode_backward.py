"""Gradients of the attention of one token over a cache. See decode_backward.cu."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...core import PyTree, ShapeAndDtype, Types
from ...kernel import CudaKernel, Launch
from .._cuda import FOLDER, ceil, name, pack
from .._supports import floats
from ._cuda import SIZES, groups_of, joining_blocks, parts_of


# The columns of a lane, and a row has 32 of those at most.
_COLUMNS, _MAX_SIZE = 8, 256
# Where more query heads share keys, arithmetic takes longer than what XLA's products read and write more.
_MAX_GROUP = 8
_THREADS, _KEYS_AT_A_TIME = 128, 4


def _block_heads(q: ShapeAndDtype, kv: Sequence[ShapeAndDtype]) -> int:
    group = q.shape[-2] // kv[0].shape[-2]
    return 4 if group > 2 else max(group, 1)


def _of_args(function: Any) -> Any:
    """A function of the op's arguments, as one of what a backward kernel's functions are called with."""

    def of(grads: PyTree, args: PyTree, *_: object, **options: Any) -> Any:
        return function(*args, **options)

    return of


def _parts(q: ShapeAndDtype, kv: Sequence[ShapeAndDtype], *_: object, resident_blocks: int, **__: object) -> int:
    return parts_of(q, kv, resident_blocks, _block_heads(q, kv))


def _grid(q: ShapeAndDtype, kv: Sequence[ShapeAndDtype], *args: Any, **options: Any) -> int:
    return groups_of(q, kv, _block_heads(q, kv)) * _parts(q, kv, *args, **options)


def _is_packed(q: ShapeAndDtype) -> bool:
    return q.shape[-1] % pack(q) == 0


def _entry(q: ShapeAndDtype, kv: Sequence[ShapeAndDtype], *_: object, soft_cap: float, **__: object) -> str:
    return name("decode_attention_backward", q, _block_heads(q, kv), _is_packed(q), soft_cap > 0)


def _keys_entry(q: ShapeAndDtype, *_: object, soft_cap: float, **__: object) -> str:
    return name("decode_attention_backward_keys", q, _is_packed(q), soft_cap > 0)


def _keys_grid(grads: PyTree, args: PyTree, *_: object, **__: object) -> int:
    if all(gradient is None for gradient in grads[1] or ()):
        return 0
    *batch, keys, kv_heads, size = args[1][0].shape
    lanes = 1 << (ceil(max(size, 1), _COLUMNS) - 1).bit_length()
    return math.prod(batch) * kv_heads * ceil(keys, _KEYS_AT_A_TIME * _THREADS // lanes)


def _workspaces(q: ShapeAndDtype, *args: Any, **options: Any) -> list[jax.ShapeDtypeStruct]:
    parts, rows = _parts(q, *args, **options), math.prod(q.shape[:-1])
    shapes = (rows, parts, 3), (rows, parts, 2, q.shape[-1]), (rows, 3)
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def _supports(types: Types, **options: object) -> bool | str:
    size, group = types.q.shape[-1], types.q.shape[-2] // max(types.kv[0].shape[-2], 1)
    if types.k_scale is not None:
        return "it has no gradients of a cache in int8"
    if types.alibi_slopes is not None:
        return "it has no gradients of ALiBi slopes"
    if size > _MAX_SIZE:
        return f"heads have to be no longer than {_MAX_SIZE}; they are {size}"
    if group > _MAX_GROUP:
        return f"no more than {_MAX_GROUP} heads of q may share those of the cache; {group} do"
    return floats(types, **options)


DECODE_ATTENTION_BACKWARD = CudaKernel(
    FOLDER / "attention" / "decode_backward.cu",
    _of_args(_entry),
    [
        Launch(
            grid=_of_args(_grid),
            block=_THREADS,
            shared_bytes=_of_args(lambda q, *_, **__: (2 * q.shape[-1] + 3) * 16),
        ),
        Launch(
            grid=_of_args(lambda q, *_, **__: joining_blocks(q)),
            block=(32, 8),
            entry=_of_args(lambda q, *_, **__: name("decode_attention_backward_join", q)),
        ),
        Launch(
            grid=_keys_grid,
            block=_THREADS,
            entry=_of_args(_keys_entry),
        ),
    ],
    scalars={
        **{of: ("int64", _of_args(size)) for of, size in SIZES.items()},
        "parts": ("int64", _of_args(_parts)),
        "window": "int64",
        "scale": "float32",
        "soft_cap": "float32",
    },
    workspaces=_of_args(_workspaces),
    asks_resident_blocks=True,
    supports=_supports,
)
