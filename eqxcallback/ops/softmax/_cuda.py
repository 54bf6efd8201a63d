"""Softmax. See softmax.cu."""

import math

from ...core import ShapeAndDtype
from ...kernel import CudaKernel, Launch
from .._cuda import FOLDER, block_of_rows, ceil, name, of_first
from .._supports import floats


def _rows(x: ShapeAndDtype) -> int:
    return math.prod(x.shape[:-1])


def _mask(x: ShapeAndDtype, mask: ShapeAndDtype | None = None) -> ShapeAndDtype | None:
    del x
    return mask


def _mask_rows(mask: ShapeAndDtype | None) -> int:
    return 1 if mask is None else math.prod(mask.shape[:-1])


def _block(x: ShapeAndDtype) -> tuple[int, int]:
    return block_of_rows(x, packs=4, most=1024, least=128)


def _blocks(x: ShapeAndDtype) -> int:
    return ceil(_rows(x), _block(x)[1])


SOFTMAX = CudaKernel(
    FOLDER / "softmax" / "softmax.cu",
    lambda x, mask=None, **_: name("softmax", x, mask is not None),
    Launch(grid=lambda x, *_, **__: _blocks(x), block=lambda x, *_, **__: _block(x)),
    scalars={
        "rows": ("int64", lambda x, *_, **__: _rows(x)),
        "mask_rows": ("int64", lambda x, mask=None, **_: _mask_rows(mask)),
        "size": ("int64", lambda x, *_, **__: x.shape[-1]),
        "scale": "float32",
    },
    supports=floats,
)
SOFTMAX_BACKWARD = CudaKernel(
    FOLDER / "softmax" / "softmax.cu",
    lambda grads, args, *_, **__: name("softmax_backward", args[0], _mask(*args) is not None),
    Launch(grid=of_first(_blocks), block=of_first(_block)),
    scalars={
        "rows": ("int64", of_first(_rows)),
        "mask_rows": ("int64", lambda grads, args, *_, **__: _mask_rows(_mask(*args))),
        "size": ("int64", of_first(lambda x: x.shape[-1])),
        "scale": "float32",
    },
    supports=floats,
)
