"""Linear layers over weights of 4 and 8 bits, one after the other, as an ONNX graph of onnxruntime's own operators."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ._onnx import FLOAT, Graph


_BLOCK = {"Q4_1": 32, "int8": 128}
_BITS = {"Q4_1": 4, "int8": 8}
# How `MatMulNBits` computes: with activations in f32, or rounded to int8 block by block.
_ACCURACY = {"exact": 1, "int8": 4}


def has_operator(encoding: str) -> bool:
    return encoding in _BLOCK


def program(
    encoding: str, layers: Sequence[Any], sizes: Sequence[tuple[int, int]], activations: str, threads: int
) -> Callable[[np.ndarray], np.ndarray]:
    """A function of rows that takes them through all layers. `layers` are parts of weights as an op of ours takes them.

    Raises where onnx or onnxruntime is not installed.
    """
    graph = _graph(encoding, layers, sizes, activations)
    running = graph.session({"x": (FLOAT, ["rows", sizes[0][1]])}, ("out", ["rows", sizes[-1][0]]), threads)
    return lambda x: running.run(["out"], {"x": x})[0]


def _graph(encoding: str, layers: Sequence[Any], sizes: Sequence[tuple[int, int]], activations: str) -> Graph:
    graph = Graph()
    node, constant = graph.node, graph.constant
    x, width = "x", sizes[0][1]
    for layer, (out_features, features) in zip(layers, sizes, strict=True):
        if width > features:  # as the others: the parts are added
            whole, rest = divmod(width, features)
            widths = np.array([features] * whole + [rest] * (rest > 0))
            parts = node("Split", [x, constant(widths)], len(widths), domain="", axis=1)
            if rest:
                parts[-1:] = node("Pad", [parts[-1], constant(np.array([0, 0, 0, features - rest]))], domain="")
            (total,) = node("Sum", parts, domain="")
            (x,) = node("Mul", [total, constant(np.float32(len(widths) ** -0.5))], domain="")
        (x,) = node(
            "MatMulNBits",
            [x, *map(constant, parts_of(encoding, layer))],
            K=features,
            N=out_features,
            bits=_BITS[encoding],
            block_size=_BLOCK[encoding],
            accuracy_level=_ACCURACY[activations],
        )
        width = out_features
    return graph


def with_integer_zeros(blocks: jax.Array) -> np.ndarray:
    """Q4_1 whose minima are integer multiples of their scales, which is all that onnxruntime's fast kernels know."""
    raw = np.array(blocks).reshape(blocks.shape[0], -1, 20)
    both = raw[..., :4].copy().view(np.float16).astype(np.float32)
    # Seven bits of a scale, so that its product with a zero point of four bits is one of f16.
    scale = (both[..., 0].astype(np.float16).view(np.uint16) & 0xFFF0).view(np.float16)
    wide = scale.astype(np.float32)
    zero = np.clip(np.rint(-both[..., 1] / np.where(wide == 0, 1, wide)), 0, 15)
    raw[..., :4] = np.stack([scale, (-zero * wide).astype(np.float16)], -1).view(np.uint8)
    return raw.reshape(blocks.shape)


def parts_of(encoding: str, layer: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights, scales and zero points of the blocks of each row. Those of 4 bits are two in a byte."""
    return _of_int8(*layer) if encoding == "int8" else _of_q4_1(layer)


def _of_q4_1(blocks: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    raw = np.asarray(blocks).reshape(blocks.shape[0], -1, 20)
    scale, least = np.moveaxis(raw[..., :4].copy().view(np.float16).astype(np.float32), -1, 0)
    digits = np.concatenate([raw[..., 4:] & 15, raw[..., 4:] >> 4], -1)
    zeros = np.rint(-least / np.where(scale == 0, 1, scale)).astype(np.uint8)
    zeros = np.pad(zeros, [(0, 0), (0, zeros.shape[1] % 2)])
    return _in_pairs(digits), scale, _in_pairs(zeros)


def _of_int8(weight: Any, scale: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    weight, scale = np.asarray(weight), np.asarray(scale)
    rows, blocks = weight.shape[0], weight.shape[1] // _BLOCK["int8"]
    codes = (weight.astype(np.int16) + 128).astype(np.uint8).reshape(rows, blocks, -1)
    scales = np.broadcast_to(scale.astype(np.float32)[:, None], (rows, blocks))
    return codes, scales, np.full((rows, blocks), 128, np.uint8)


def _in_pairs(digits: np.ndarray) -> np.ndarray:
    """Two in each byte, the first in the lower half."""
    return digits[..., ::2] | digits[..., 1::2] << 4
