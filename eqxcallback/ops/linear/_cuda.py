"""Linear layers over weights in blocks. See quantized.cu."""

import dataclasses
import math
from typing import Any

from ...kernel import CudaKernel, Launch
from .._cuda import FOLDER, ceil, name
from .._supports import floats


# With more rows, a tile of weights is decoded once for all of them.
_FEW_ROWS = 8


def _rows(x: Any) -> int:
    return math.prod(x.shape[:-1])


def _is_tiled(x: Any) -> bool:
    return _rows(x) > _FEW_ROWS


def _rows_of_block(x: Any) -> int:
    return next((count for count in (1, 2, 4) if count >= _rows(x)), _FEW_ROWS)


def _entry(x: Any, blocks: Any, *, encoding: str, **_: Any) -> str:
    code = f"eqxcallback::{encoding}"
    if _is_tiled(x):
        return name("quantized_linear_tiled", x, code)
    return name("quantized_linear", x, code, _rows_of_block(x))


def _grid(x: Any, blocks: Any, **_: Any) -> tuple[int, int]:
    if _is_tiled(x):
        return ceil(blocks.shape[0], 64), ceil(_rows(x), 64)
    return ceil(blocks.shape[0], 4), ceil(_rows(x), _rows_of_block(x))


def _supports_any_rows(types: Any, *, activations: str = "exact", **options: Any) -> bool | str:
    return floats(types, **options) if activations == "exact" else f"it has no {activations} activations"


def _supports(types: Any, **options: Any) -> bool | str:
    if _is_tiled(types.x):
        return f"x can have at most {_FEW_ROWS} rows, as XLA is faster at products of matrices; it has {_rows(types.x)}"
    return _supports_any_rows(types, **options)


QUANTIZED_LINEAR = CudaKernel(
    FOLDER / "linear" / "quantized.cu",
    _entry,
    Launch(grid=_grid, block=lambda x, blocks, **_: 256 if _is_tiled(x) else 128),
    scalars={
        "rows": ("int64", lambda x, blocks, **_: _rows(x)),
        "in_features": ("int64", lambda x, blocks, **_: x.shape[-1]),
        "out_features": ("int64", lambda x, blocks, **_: blocks.shape[0]),
    },
    supports=_supports,
)
QUANTIZED_LINEAR_IF_CHOSEN = dataclasses.replace(QUANTIZED_LINEAR, supports=_supports_any_rows, only_if_chosen=True)
