"""Products with weights of floats, of blocks of a few bits, or of int8, and rows of tables."""

from types import ModuleType

import numpy as np

from ...kernel import PythonKernel
from .._numpy import XpArray, on_arrays, store, wide
from ._supports import has_encoding


_CHUNK = 1024  # output features whose weights are expanded at a time


@on_arrays
def linear(xp: ModuleType, out: XpArray, x: XpArray, weight: XpArray, bias: XpArray | None = None) -> None:
    y = wide(x) @ wide(weight).T
    store(out, y if bias is None else y + bias)


@on_arrays
def embedding(xp: ModuleType, out: XpArray, index: XpArray, weight: XpArray) -> None:
    size = weight.shape[0]
    out[...] = weight[xp.clip(xp.where(index < 0, index + size, index), 0, size - 1)]


@on_arrays
def quantized_linear(
    xp: ModuleType, out: XpArray, x: XpArray, blocks: XpArray, *, encoding: str, activations: str
) -> None:
    x = wide(x) if activations == "exact" else _quantize_activations(xp, wide(x), 32)
    for first in range(0, blocks.shape[0], _CHUNK):
        here = slice(first, first + _CHUNK)
        store(out[..., here], x @ _decoded(xp, blocks[here], encoding).T)


@on_arrays
def int8_linear(xp: ModuleType, out: XpArray, x: XpArray, weight: XpArray, scale: XpArray, *, activations: str) -> None:
    x = wide(x) if activations == "exact" else _quantize_activations(xp, wide(x), x.shape[-1])
    for first in range(0, weight.shape[0], _CHUNK):
        here = slice(first, first + _CHUNK)
        store(out[..., here], x @ weight[here].astype(x.dtype).T * scale[here])


def _quantize_activations(xp: ModuleType, x: XpArray, block: int) -> XpArray:
    """See `eqxcallback.ops.int8_linear`."""
    if block == 0:
        return x
    parts = x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
    highest = xp.max(xp.abs(parts), axis=-1, keepdims=True)
    is_low = highest < 2.0**-100
    inverse = xp.where(is_low, 0, 127 / xp.where(is_low, 1, highest)).astype(x.dtype)
    finite = xp.isfinite(highest)
    nearest = xp.round(xp.where(finite, parts, 0) * inverse) * (highest / 127)
    return xp.where(finite, nearest, parts).reshape(x.shape)


def _decoded(xp: ModuleType, blocks: XpArray, encoding: str) -> XpArray:
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


EMBEDDING = PythonKernel(embedding, only_if_chosen=True)
INT8_LINEAR = PythonKernel(int8_linear, only_if_chosen=True)
LINEAR = PythonKernel(linear, only_if_chosen=True)
QUANTIZED_LINEAR = PythonKernel(
    quantized_linear, only_if_chosen=True, supports=lambda types, *, encoding, **_: has_encoding(encoding)
)
