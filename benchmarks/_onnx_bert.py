"""The encoder of `models.bert` as an ONNX graph of onnxruntime's own fused operators: what its optimizer makes of a BERT."""

from collections.abc import Callable
from typing import Any

import numpy as np

from models import bert
from models.embedder import Batch

from ._onnx import INT32, Graph


def session(model: bert.Bert, threads: int) -> Callable[[Batch], np.ndarray]:
    """Raises where onnx or onnxruntime is not installed."""
    inputs = {name: (INT32, ["B", "S"]) for name in ("tokens", "kinds", "mask")}
    running = _graph(model).session(inputs, ("x", ["B", "S", model.norm.shape[0]]), threads)

    def vectors(batch: Batch) -> np.ndarray:
        is_real = (np.arange(batch.tokens.shape[1]) < batch.lengths[:, None]).astype(np.int32)
        (x,) = running.run(["x"], {"tokens": batch.tokens, "kinds": np.zeros_like(batch.tokens), "mask": is_real})
        total = (x * is_real[..., None]).sum(1)
        return total / np.maximum(np.linalg.norm(total, axis=1, keepdims=True), 1e-12)

    return vectors


def _graph(model: bert.Bert) -> Graph:
    graph = Graph()
    node, constant = graph.node, graph.constant

    def add_norm(layer: Any, x: str, residual: str, bias: Any) -> str:
        inputs = [x, residual, constant(layer.weight), constant(layer.bias), constant(bias)]
        return node("SkipLayerNormalization", inputs, epsilon=layer.eps)[0]

    def product(x: str, layer: Any) -> str:
        return node("MatMul", [x, constant(np.asarray(layer.weight).T)], domain="")[0]

    tables = [constant(table.weight) for table in (model.tokens, model.positions, model.kinds)]
    norm = [constant(model.norm.weight), constant(model.norm.bias)]
    x, lengths = node("EmbedLayerNormalization", ["tokens", "kinds", *tables, *norm, "mask"], 2, epsilon=model.norm.eps)
    for block in model.blocks:
        (projection,) = block.projections
        weight, bias = constant(np.asarray(projection.weight).T), constant(projection.bias)
        (attended,) = node("Attention", [x, weight, bias, lengths], num_heads=block.num_heads)
        x = add_norm(block.attention_norm, product(attended, block.attention_out), x, block.attention_out.bias)
        (hidden,) = node("BiasGelu", [product(x, block.up), constant(block.up.bias)])
        x = add_norm(block.feed_forward_norm, product(hidden, block.down), x, block.down.bias)
    return graph
