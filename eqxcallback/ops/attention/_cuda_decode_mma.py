"""The attention of one token over a large cache by tensor cores. See decode_mma.cu."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, cast

import jax.numpy as jnp

from ...core import ShapeAndDtype, Types
from ...kernel import CudaKernel, Launch
from ...transform import architecture, version_of
from .._cuda import FOLDER, name
from ._cuda import (
    DECODE_ATTENTION,
    groups_of,
    join_entry,
    joining_blocks,
    of_pairs,
    parts_of,
    supports_decode,
    workspaces_of,
)


# Query heads that are rows of one product, and the least number of those that share keys for which this is worth it: of two,
# the kernel above reads memory as fast as there is.
_HEADS_BY_MMA, _LEAST_HEADS_BY_MMA = 16, 3
# Products have so many columns, and registers suffice for heads of this size.
_COLUMNS_BY_MMA, _MAX_SIZE_BY_MMA = 16, 256


def _warps_by_mma(q: ShapeAndDtype) -> int:
    return 2 if q.shape[-1] > 128 else 4


def _entry_by_mma(
    q: ShapeAndDtype,
    kv: Sequence[ShapeAndDtype],
    length: ShapeAndDtype,
    slopes: ShapeAndDtype | None = None,
    *_: object,
    soft_cap: float = 0.0,
    **__: object,
) -> str:
    return name("decode_attention_mma", q, CudaKernel.ctype(kv[0].dtype), q.shape[-1], of_pairs(slopes, soft_cap))


def _parts_by_mma(q: ShapeAndDtype, kv: Sequence[ShapeAndDtype], *_: object, resident_blocks: int, **__: object) -> int:
    return parts_of(q, kv, resident_blocks, _HEADS_BY_MMA)


def _shared_bytes_by_mma(q: ShapeAndDtype, kv: Sequence[ShapeAndDtype], *_: object, **__: object) -> int:
    """The queries, and of each warp a ring of four times 16 rows, with scales in int8, whose place 16 softmaxes take."""
    size, cache = q.shape[-1], kv[0].dtype
    tile = 16 * (16 * (size * cache.itemsize // 16 | 1) + (4 if cache == jnp.int8 else 0))
    return _warps_by_mma(q) * max(4 * tile, 16 * 4 * (size + 2)) + 16 * 2 * size


def _supports_mma(types: Types, **options: object) -> bool | str:
    q, cache = types.q, types.kv[0]
    size, group = q.shape[-1], q.shape[-2] // cache.shape[-2]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"tensor cores multiply bfloat16 and float16; q is {q.dtype}"
    if cache.dtype != q.dtype and (cache.dtype, q.dtype) != (jnp.int8, jnp.bfloat16):
        return f"the cache has to have the dtype of q, or int8 with q in bfloat16; q is {q.dtype}, and the cache {cache.dtype}"
    if size % _COLUMNS_BY_MMA or not 0 < size <= _MAX_SIZE_BY_MMA:
        return f"heads have to be a multiple of {_COLUMNS_BY_MMA} up to {_MAX_SIZE_BY_MMA} long; they are {size}"
    if group < _LEAST_HEADS_BY_MMA:
        return f"{_LEAST_HEADS_BY_MMA} heads of q or more have to share those of the cache; {group} do"
    return supports_decode(types, **options)


DECODE_ATTENTION_MMA = dataclasses.replace(
    DECODE_ATTENTION,
    source=FOLDER / "attention" / "decode_mma.cu",
    entry=_entry_by_mma,
    launch=[
        Launch(
            grid=lambda q, kv, *args, **options: (
                groups_of(q, kv, _HEADS_BY_MMA) * _parts_by_mma(q, kv, *args, **options)
            ),
            block=lambda q, *_, **__: 32 * _warps_by_mma(q),
            shared_bytes=_shared_bytes_by_mma,
        ),
        # One part is whole: the first launch has divided by its sum.
        Launch(
            grid=lambda *args, **options: joining_blocks(args[0]) if _parts_by_mma(*args, **options) > 1 else 0,
            block=(32, 8),
            entry=join_entry,
        ),
    ],
    scalars={**DECODE_ATTENTION.scalars, "parts": ("int64", _parts_by_mma)},
    workspaces=lambda *args, **options: workspaces_of(args[0], _parts_by_mma(*args, **options)),
    supports=_supports_mma,
)

# The first architecture with launches that begin before the one ahead has ended.
_LEAST_OVERLAPPED = 90


def _supports_overlapped(types: Types, **options: object) -> bool | str:
    # Only machine code of such a device waits for the launch ahead: PTX for 8.0 has no instruction for it.
    arch = architecture(None)
    if not arch.startswith("sm_") or version_of(arch) < _LEAST_OVERLAPPED:
        return f"the architecture has to be sm_{_LEAST_OVERLAPPED} or newer; it is {arch}"
    return _supports_mma(types, **options)


_FIRST_BY_MMA, _JOIN_BY_MMA = cast(Any, DECODE_ATTENTION_MMA.launch)
# The second launch is made ready while the first one ends.
DECODE_ATTENTION_MMA_OVERLAPPED = dataclasses.replace(
    DECODE_ATTENTION_MMA,
    launch=[_FIRST_BY_MMA, dataclasses.replace(_JOIN_BY_MMA, programmatic=True)],
    supports=_supports_overlapped,
)

# The least bytes of keys and values for which this is known to be the faster one. On an H100 it reads 17 MB at 990 GB/s, and the
# plain kernel at 940; 134 MB at 2,290 to 2,450, and that at 2,020 to 2,110.
_LEAST_BYTES = 16 << 20


def _supports_large(types: Types, **options: object) -> bool | str:
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in types.kv)
    if size < _LEAST_BYTES:
        return f"keys and values have to have {_LEAST_BYTES >> 20} MiB or more; they have {size:,} bytes"
    return _supports_overlapped(types, **options)


DECODE_ATTENTION_OF_LARGE_CACHES = dataclasses.replace(DECODE_ATTENTION_MMA_OVERLAPPED, supports=_supports_large)
