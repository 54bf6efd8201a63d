"""Linear layers over weights in blocks. See quantized.cu, and quantized_mma.cu for tensor cores."""

import dataclasses
import math
from typing import Any, NamedTuple

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


# Blocks of 64 rows, of which a grid has no more along its second axis.
_MOST_ROWS = 64 * 65535


def _grid(x: ShapeAndDtype, blocks: ShapeAndDtype, **_: object) -> tuple[int, int]:
    if _is_tiled(x):
        return ceil(blocks.shape[0], 64), ceil(_rows(x), 64)
    return ceil(blocks.shape[0], 4), ceil(_rows(x), _rows_of_block(x))


def _supports_any_rows(types: Types, *, encoding: str, activations: str = "exact") -> bool | str:
    if activations != "exact":
        return f"it has no {activations} activations"
    if _rows(types.x) > _MOST_ROWS:
        return f"x can have at most {_MOST_ROWS} rows, as many as a grid has; it has {_rows(types.x)}"
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
# Features of a part, and the bytes that a row of weights has of it in shared memory.
_FEATURES_BY_MMA = 128
_STRIDE_BY_MMA = {
    **{"Q4_0": 80, "Q4_1": 112, "Q5_0": 112, "Q5_1": 112, "Q8_0": 144},
    **{"Q4_K": 96, "Q5_K": 160, "Q6_K": 176},
}
# Rows of weights of a block.
_WEIGHTS_BY_MMA = 32
# With fewer rows of weights there are not three blocks for each multiprocessor of a large GPU: a block of few rows of x has more
# warps, and one of many has fewer rows.
_MANY_WEIGHTS = 8192
# What each GPU of 8.0 and later has for a block.
_MOST_SHARED_BYTES = 99 << 10


class _Layout(NamedTuple):
    """The tiles of 8 rows of x that a block has, and its warps, which take parts of the features."""

    row_tiles: int
    warps: int

    def shared_bytes(self, x: ShapeAndDtype, encoding: str) -> int:
        """Return the bytes of two parts of each warp, or of its sums. Many rows of x are not in shared memory."""
        rows = min(_rows(x), 8 * self.row_tiles) if self.row_tiles <= 2 else 0
        of_part = _WEIGHTS_BY_MMA * _STRIDE_BY_MMA[encoding] + 2 * _FEATURES_BY_MMA * rows
        return self.warps * max(2 * of_part, self.row_tiles * 8 * _WEIGHTS_BY_MMA * 4)


# By the rows of x that they are for at most.
_LAYOUTS = {
    True: {8: _Layout(1, 4), 16: _Layout(2, 4), 32: _Layout(4, 4), _MOST_ROWS_BY_MMA: _Layout(8, 4)},
    False: {8: _Layout(1, 8), 16: _Layout(2, 4), _MOST_ROWS_BY_MMA: _Layout(4, 4)},
}
# Scales of 6 bits take registers, and so do fifth bits beside minimums.
_MOST_ROW_TILES = {"Q5_1": 4, "Q4_K": 4, "Q5_K": 4, "Q6_K": 4}


def _layout(x: ShapeAndDtype, blocks: ShapeAndDtype, encoding: str) -> _Layout:
    layouts = _LAYOUTS[blocks.shape[0] >= _MANY_WEIGHTS]
    layout = next(made for most, made in layouts.items() if min(_rows(x), _MOST_ROWS_BY_MMA) <= most)
    layout = layout._replace(row_tiles=min(layout.row_tiles, _MOST_ROW_TILES.get(encoding, layout.row_tiles)))
    return layout if layout.shared_bytes(x, encoding) <= _MOST_SHARED_BYTES else layout._replace(warps=4)


def _entry_by_mma(x: ShapeAndDtype, blocks: ShapeAndDtype, *more: bool, encoding: str, **_: object) -> str:
    return name("quantized_linear_mma", x, f"eqxcallback::{encoding}", *_layout(x, blocks, encoding), *more)


def _grid_by_mma(x: ShapeAndDtype, blocks: ShapeAndDtype, *, encoding: str, **_: object) -> tuple[int, int]:
    # With a gate, half of the rows of weights of a block are its, and half are those it is for: as many blocks.
    layout = _layout(x, blocks, encoding)
    return ceil(blocks.shape[0], _WEIGHTS_BY_MMA), ceil(_rows(x), 8 * layout.row_tiles)


def _block_by_mma(x: ShapeAndDtype, blocks: ShapeAndDtype, *, encoding: str, **_: object) -> int:
    return 32 * _layout(x, blocks, encoding).warps


def _shared_bytes_by_mma(x: ShapeAndDtype, blocks: ShapeAndDtype, *, encoding: str, **_: object) -> int:
    return _layout(x, blocks, encoding).shared_bytes(x, encoding)


def _supports_mma(types: Types, *, encoding: str, activations: str = "exact") -> bool | str:
    x = types.x
    if activations != "exact":
        return f"it has no {activations} activations"
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"tensor cores multiply bfloat16 and float16; x is {x.dtype}"
    if (supported := has_encoding(encoding, tuple(_STRIDE_BY_MMA))) is not True:
        return supported
    if x.shape[-1] % _FEATURES_BY_MMA:
        return f"in_features have to be a multiple of {_FEATURES_BY_MMA}; they are {x.shape[-1]}"
    if _rows(x) > _MOST_ROWS_BY_MMA:
        return f"x can have at most {_MOST_ROWS_BY_MMA} rows; it has {_rows(x)}"
    return True


QUANTIZED_LINEAR_MMA = CudaKernel(
    FOLDER / "linear" / "quantized_mma.cu",
    _entry_by_mma,
    Launch(grid=_grid_by_mma, block=_block_by_mma, shared_bytes=_shared_bytes_by_mma),
    scalars=_SCALARS,
    supports=_supports_mma,
)

# The fewest rows for which it is the faster one. What 14,336 x 4,096 weights take on an H200, in us, with one row and with
# eight: in Q4_1 17.3 and 18.6, and the kernel above 18.6 with one; in Q8_0 25.4 and 28.9, and that 23.6, and 39.1 with four rows;
# in Q4_K 26.8 and 27.1, and that 25.3 and 89, with two rows 30.7; in Q5_K 36.2 and as much, and that 31.0 and 86. Of 1,024 x
# 4,096 weights in Q4_1 one row takes 6.4, and 4.0 above. Not measured: Q4_0, Q5_0 and Q5_1, by the larger of these, and Q6_K.
_LEAST_ROWS_BY_MMA = {**dict.fromkeys(_STRIDE_BY_MMA, 3), "Q4_1": 2, "Q4_K": 2}
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


QUANTIZED_LINEAR_SWIGLU = dataclasses.replace(
    QUANTIZED_LINEAR,
    entry=lambda x, blocks, *, encoding, **_: name(
        "quantized_linear", x, f"eqxcallback::{encoding}", _rows_of_block(x), True
    ),
    launch=Launch(
        grid=lambda x, blocks, **_: (ceil(blocks.shape[0] // 2, 2), ceil(_rows(x), _rows_of_block(x))), block=128
    ),
    scalars={**_SCALARS, "out_features": ("int64", lambda x, blocks, **_: blocks.shape[0] // 2)},
)
QUANTIZED_LINEAR_SWIGLU_MMA = dataclasses.replace(
    QUANTIZED_LINEAR_MMA,
    entry=lambda x, blocks, **options: _entry_by_mma(x, blocks, True, **options),
    scalars=QUANTIZED_LINEAR_SWIGLU.scalars,
)
QUANTIZED_LINEAR_SWIGLU_OF_SEVERAL_ROWS = dataclasses.replace(
    QUANTIZED_LINEAR_SWIGLU_MMA, supports=_supports_several_rows
)
