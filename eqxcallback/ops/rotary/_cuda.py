"""Rotary position embedding. See rotary.cu."""

import math
from collections.abc import Sequence

from ...core import PyTree, ShapeAndDtype
from ...kernel import CudaKernel, Launch
from .._cuda import FOLDER, ceil, name, of_first, pack
from .._supports import floats


_HEADS_OF_THREAD = 4


def _rows(x: ShapeAndDtype) -> int:
    """Rows of heads, in all batch axes."""
    return math.prod(x.shape[:-2])


def _table_rows(table: Sequence[ShapeAndDtype]) -> int:
    return math.prod(table[0].shape[:-1])


def _columns(x: ShapeAndDtype) -> int:
    """The threads that share half a head."""
    half = x.shape[-1] // 2
    return half // pack(x) if half % pack(x) == 0 else half


def _blocks(x: ShapeAndDtype, table: Sequence[ShapeAndDtype]) -> int:
    return ceil(_rows(x) * ceil(x.shape[-2], _HEADS_OF_THREAD) * _columns(x), 256)


ROTARY_EMBEDDING = CudaKernel(
    FOLDER / "rotary" / "rotary.cu",
    lambda x, table: name("rotary_embedding", x),
    Launch(grid=_blocks, block=256),
    scalars={
        "rows": ("int64", lambda x, table: _rows(x)),
        "table_rows": ("int64", lambda x, table: _table_rows(table)),
        "heads": ("int64", lambda x, table: x.shape[-2]),
        "size": ("int64", lambda x, table: x.shape[-1]),
    },
    supports=floats,
)


def _wants_table(grads: PyTree) -> bool:
    """True if a gradient of a table is needed."""
    return any(gradient is not None for gradient in grads[1] or ())


def _backward_blocks(grads: PyTree, args: PyTree, *_: object) -> int:
    x, table = args
    # A thread has all rows of one row of the table, whose gradient it sums.
    return ceil(_table_rows(table) * _columns(x), 64) if _wants_table(grads) else _blocks(x, table)


ROTARY_EMBEDDING_BACKWARD = CudaKernel(
    FOLDER / "rotary" / "rotary.cu",
    lambda grads, args, *_: name("rotary_embedding_backward", args[0], _wants_table(grads)),
    Launch(grid=_backward_blocks, block=lambda grads, *_: 64 if _wants_table(grads) else 256),
    scalars={
        "rows": ("int64", of_first(_rows)),
        "table_rows": ("int64", lambda grads, args, *_: _table_rows(args[1])),
        "heads": ("int64", of_first(lambda x: x.shape[-2])),
        "size": ("int64", of_first(lambda x: x.shape[-1])),
    },
    supports=floats,
)


def _append_blocks(qkv: ShapeAndDtype, *_: object) -> int:
    return ceil(_rows(qkv) * qkv.shape[-2] * _columns(qkv), 128)


ROTARY_APPEND = CudaKernel(
    FOLDER / "rotary" / "rotary.cu",
    lambda qkv, *_: name("rotary_append", qkv),
    Launch(grid=_append_blocks, block=128),
    scalars={
        "rows": ("int64", lambda qkv, *_: _rows(qkv)),
        "table_rows": ("int64", lambda qkv, table, *_: _table_rows(table)),
        "count": ("int64", lambda qkv, *_: qkv.shape[-3]),
        "heads": ("int64", lambda qkv, table, k_cache, *_: qkv.shape[-2] - 2 * k_cache.shape[-2]),
        "kv_heads": ("int64", lambda qkv, table, k_cache, *_: k_cache.shape[-2]),
        "size": ("int64", lambda qkv, *_: qkv.shape[-1]),
        "length": ("int64", lambda qkv, table, k_cache, *_: k_cache.shape[-3]),
        "positions": ("int64", lambda qkv, table, k_cache, v_cache, position: position.size),
    },
    aliases={"k_cache": 1, "v_cache": 2},
    supports=floats,
)
