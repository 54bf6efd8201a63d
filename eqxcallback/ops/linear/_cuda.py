"""Linear layers over weights in blocks. See quantized.cu, and quantized_mma.cu for tensor cores."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from ...core import ShapeAndDtype, Types
from ...kernel import CudaKernel, Launch
from ...transform import architecture, version_of
from .._cuda import FOLDER, ceil, name
from .._supports import floats
from ._supports import has_encoding


# Those of files; a file has no rows side by side.
ENCODINGS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
# With more rows, a tile of weights is decoded once for all of them.
_FEW_ROWS = 8


def _rows(x: ShapeAndDtype) -> int:
    return math.prod(x.shape[:-1])


def _is_tiled(x: ShapeAndDtype) -> bool:
    return _rows(x) > _FEW_ROWS


def _rows_of_block(x: ShapeAndDtype) -> int:
    return next((count for count in (1, 2, 4) if count >= _rows(x)), _FEW_ROWS)


def _entry(x: ShapeAndDtype, blocks: ShapeAndDtype, *, encoding: str, **_: object) -> str:
    code = f"eqxcallback::{encoding}"
    if _is_tiled(x):
        return name("quantized_linear_tiled", x, code)
    return name("quantized_linear", x, code, _rows_of_block(x))


def _grid(x: ShapeAndDtype, blocks: ShapeAndDtype, **_: object) -> tuple[int, int]:
    if _is_tiled(x):
        return ceil(blocks.shape[0], 64), ceil(_rows(x), 64)
    return ceil(blocks.shape[0], 4), ceil(_rows(x), _rows_of_block(x))


def _supports_any_rows(types: Types, *, encoding: str, activations: str = "exact") -> bool | str:
    if activations != "exact":
        return f"it has no {activations} activations"
    supported = has_encoding(encoding, ENCODINGS)
    return floats(types) if supported is True else supported


def _supports(types: Types, **options: Any) -> bool | str:
    if _is_tiled(types.x):
        return f"x can have at most {_FEW_ROWS} rows, as XLA is faster at products of matrices; it has {_rows(types.x)}"
    return _supports_any_rows(types, **options)


_SCALARS = {
    "rows": ("int64", lambda x, blocks, **_: _rows(x)),
    "in_features": ("int64", lambda x, blocks, **_: x.shape[-1]),
    "out_features": ("int64", lambda x, blocks, **_: blocks.shape[0]),
}
QUANTIZED_LINEAR = CudaKernel(
    FOLDER / "linear" / "quantized.cu",
    _entry,
    Launch(grid=_grid, block=lambda x, blocks, **_: 256 if _is_tiled(x) else 128),
    scalars=_SCALARS,
    supports=_supports,
)
QUANTIZED_LINEAR_IF_CHOSEN = dataclasses.replace(QUANTIZED_LINEAR, supports=_supports_any_rows, only_if_chosen=True)


# With more rows, products of matrices are not bound by reading weights.
_MOST_ROWS_BY_MMA = 64
# Features of 8 blocks, which are whole packs of 16 bytes in both encodings.
_FEATURES_BY_MMA = 256


def _row_tiles(x: ShapeAndDtype) -> int:
    """Return the number of tiles of 8 rows in a block, at most 4: there are no registers for more."""
    return next((count for count in (1, 2) if 8 * count >= _rows(x)), 4)


def _supports_mma(types: Types, *, encoding: str, activations: str = "exact") -> bool | str:
    x = types.x
    if activations != "exact":
        return f"it has no {activations} activations"
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"tensor cores multiply bfloat16 and float16; x is {x.dtype}"
    if x.shape[-1] % _FEATURES_BY_MMA:
        return f"in_features have to be a multiple of {_FEATURES_BY_MMA}; they are {x.shape[-1]}"
    if _rows(x) > _MOST_ROWS_BY_MMA:
        return f"x can have at most {_MOST_ROWS_BY_MMA} rows; it has {_rows(x)}"
    return has_encoding(encoding)


QUANTIZED_LINEAR_MMA = CudaKernel(
    FOLDER / "linear" / "quantized_mma.cu",
    lambda x, blocks, *, encoding, **_: name("quantized_linear_mma", x, f"eqxcallback::{encoding}", _row_tiles(x)),
    Launch(grid=lambda x, blocks, **_: (ceil(blocks.shape[0], 32), ceil(_rows(x), 8 * _row_tiles(x))), block=128),
    scalars=_SCALARS,
    supports=_supports_mma,
)

# The fewest rows for which it is the faster one. On an H100 it reads 14,336 x 4,096 weights in Q4_1 at 1,650 GB/s with two rows
# and at 1,580 with eight, the kernel above at 1,550 and 480; in Q8_0 at 1,590 with four rows and at 1,520 with eight, and that at
# 1,630 and 1,000.
_LEAST_ROWS_BY_MMA = {"Q4_1": 2, "Q8_0": 5}
# The first architecture with these products.
_LEAST_ARCHITECTURE = 80


def _supports_several_rows(types: Types, **options: Any) -> bool | str:
    if (reason := _supports_mma(types, **options)) is not True:
        return reason
    rows, least = _rows(types.x), _LEAST_ROWS_BY_MMA[options["encoding"]]
    if rows < least:
        return f"x has to have {least} rows or more; it has {rows}"
    if version_of(architecture(None)) < _LEAST_ARCHITECTURE:
        return f"the architecture has to be sm_{_LEAST_ARCHITECTURE} or newer; it is {architecture(None)}"
    return True


QUANTIZED_LINEAR_OF_SEVERAL_ROWS = dataclasses.replace(QUANTIZED_LINEAR_MMA, supports=_supports_several_rows)


def _supports_gated(types: Types, **options: Any) -> bool | str:
    if _supports_several_rows(types, **options) is True:
        return "tensor cores take these rows, in a kernel without a gate"
    return _supports(types, **options)


QUANTIZED_LINEAR_SWIGLU = dataclasses.replace(
    QUANTIZED_LINEAR,
    entry=lambda x, blocks, *, encoding, **_: name(
        "quantized_linear", x, f"eqxcallback::{encoding}", _rows_of_block(x), True
    ),
    launch=Launch(
        grid=lambda x, blocks, **_: (ceil(blocks.shape[0] // 2, 2), ceil(_rows(x), _rows_of_block(x))), block=128
    ),
    scalars={**_SCALARS, "out_features": ("int64", lambda x, blocks, **_: blocks.shape[0] // 2)},
    supports=_supports_gated,
)
