"""Linear layers over weights of 4 and 8 bits, one after the other, as an ONNX graph of onnxruntime's own operators."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np


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
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    graph = _graph(encoding, layers, sizes, activations)
    running = runtime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    return lambda x: running.run(["out"], {"x": x})[0]


def _graph(encoding: str, layers: Sequence[Any], sizes: Sequence[tuple[int, int]], activations: str) -> bytes:
    helper, numpy_helper = (importlib.import_module(f"onnx.{name}") for name in ("helper", "numpy_helper"))
    nodes: list[Any] = []
    constants: list[Any] = []

    def constant(value: Any) -> str:
        constants.append(numpy_helper.from_array(np.ascontiguousarray(value), f"w{len(constants)}"))
        return constants[-1].name

    def node(operator: str, inputs: Sequence[str], outputs: int = 1, domain: str = "", **attributes: Any) -> list[str]:
        names = [f"{operator}{len(nodes)}.{i}" for i in range(outputs)]
        nodes.append(helper.make_node(operator, inputs, names, domain=domain, **attributes))
        return names

    x, width = "x", sizes[0][1]
    for layer, (out_features, features) in zip(layers, sizes, strict=True):
        if width > features:  # as the others: the parts are added
            count = -(-width // features)
            widths = np.array([features] * (width // features) + [width % features] * (width % features > 0))
            parts = node("Split", [x, constant(widths)], count, axis=1)
            if width % features:
                pads = constant(np.array([0, 0, 0, features - width % features]))
                parts[-1:] = node("Pad", [parts[-1], pads])
            (total,) = node("Sum", parts)
            (x,) = node("Mul", [total, constant(np.float32(count**-0.5))])
        codes, scales, zeros = parts_of(encoding, layer)
        (x,) = node(
            "MatMulNBits",
            [x, constant(codes), constant(scales), constant(zeros)],
            domain="com.microsoft",
            K=features,
            N=out_features,
            bits=_BITS[encoding],
            block_size=_BLOCK[encoding],
            accuracy_level=_ACCURACY[activations],
        )
        width = out_features
    nodes[-1].output[0] = "out"
    floats = 1
    given, result = (
        helper.make_tensor_value_info(name, floats, ["rows", size])
        for name, size in (("x", sizes[0][1]), ("out", width))
    )
    graph = helper.make_graph(nodes, "linear", [given], [result], constants)
    versions = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=versions, ir_version=8).SerializeToString()


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
