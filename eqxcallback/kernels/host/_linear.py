"""Products with weights of floats, of blocks of a few bits, or of int8, and rows of tables."""

from typing import Any

import numpy as np

from ._arrays import on_arrays, store, wide


_CHUNK = 1024  # output features whose weights are expanded at a time


@on_arrays
def linear(xp: Any, out: Any, x: Any, weight: Any, bias: Any = None) -> None:
    y = wide(x) @ wide(weight).T
    store(out, y if bias is None else y + bias)


@on_arrays
def embedding(xp: Any, out: Any, weight: Any, index: Any) -> None:
    size = weight.shape[0]
    out[...] = weight[xp.clip(xp.where(index < 0, index + size, index), 0, size - 1)]


@on_arrays
def quantized_linear(xp: Any, out: Any, x: Any, blocks: Any, *, encoding: str) -> None:
    x = wide(x)
    for first in range(0, blocks.shape[0], _CHUNK):
        here = slice(first, first + _CHUNK)
        store(out[..., here], x @ _decoded(xp, blocks[here], encoding).T)


@on_arrays
def int8_linear(xp: Any, out: Any, x: Any, weight: Any, scale: Any) -> None:
    x = wide(x)
    for first in range(0, weight.shape[0], _CHUNK):
        here = slice(first, first + _CHUNK)
        store(out[..., here], x @ weight[here].astype(x.dtype).T * scale[here])


def _decoded(xp: Any, blocks: Any, encoding: str) -> Any:
    """See `eqxcallback.ops.dequantize`."""
    rows, size = blocks.shape
    length = 20 if encoding == "Q4_1" else 34
    parts = blocks.reshape(rows, size // length, length)
    halves = 4 if encoding == "Q4_1" else 2
    numbers = xp.ascontiguousarray(parts[..., :halves]).view(np.float16).astype(np.float32)
    rest = xp.ascontiguousarray(parts[..., halves:])
    if encoding == "Q4_1":
        digits = xp.concatenate([rest & 15, rest >> 4], axis=-1).astype(np.float32)
        values = digits * numbers[..., :1] + numbers[..., 1:]
    else:
        values = rest.view(np.int8).astype(np.float32) * numbers
    return values.reshape(rows, size // length * 32)
