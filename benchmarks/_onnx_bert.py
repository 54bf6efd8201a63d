"""The encoder of `models.bert` as an ONNX graph of onnxruntime's own fused operators: what its optimizer makes of a BERT."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from models import bert
from models.embedder import Batch


def session(model: bert.Bert, threads: int) -> Callable[[Batch], np.ndarray]:
    """Raises where onnx or onnxruntime is not installed."""
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    running = runtime.InferenceSession(_graph(model), options, providers=["CPUExecutionProvider"])

    def vectors(batch: Batch) -> np.ndarray:
        is_real = (np.arange(batch.tokens.shape[1]) < batch.lengths[:, None]).astype(np.int32)
        (x,) = running.run(["x"], {"tokens": batch.tokens, "kinds": np.zeros_like(batch.tokens), "mask": is_real})
        total = (x * is_real[..., None]).sum(1)
        return total / np.maximum(np.linalg.norm(total, axis=1, keepdims=True), 1e-12)

    return vectors


def _graph(model: bert.Bert) -> bytes:
    helper, numpy_helper = (importlib.import_module(f"onnx.{name}") for name in ("helper", "numpy_helper"))
    nodes: list[Any] = []
    weights: list[Any] = []

    def constant(value: Any) -> str:
        weights.append(numpy_helper.from_array(np.ascontiguousarray(value), f"w{len(weights)}"))
        return weights[-1].name

    def node(
        operator: str, inputs: list[str], outputs: int = 1, domain: str = "com.microsoft", **attributes: Any
    ) -> str:
        names = [f"{operator}{len(nodes)}.{i}" for i in range(outputs)]
        nodes.append(helper.make_node(operator, inputs, names, domain=domain, **attributes))
        return names[0]

    def add_norm(layer: Any, x: str, residual: str, bias: Any) -> str:
        inputs = [x, residual, constant(layer.weight), constant(layer.bias), constant(bias)]
        return node("SkipLayerNormalization", inputs, epsilon=layer.eps)

    def product(x: str, layer: Any) -> str:
        return node("MatMul", [x, constant(np.asarray(layer.weight).T)], domain="")

    tables = [constant(table.weight) for table in (model.tokens, model.positions, model.kinds)]
    norm = [constant(model.norm.weight), constant(model.norm.bias)]
    x = node("EmbedLayerNormalization", ["tokens", "kinds", *tables, *norm, "mask"], 2, epsilon=model.norm.eps)
    lengths = nodes[-1].output[1]
    for block in model.blocks:
        (projection,) = block.projections
        weight, bias = constant(np.asarray(projection.weight).T), constant(projection.bias)
        attended = node("Attention", [x, weight, bias, lengths], num_heads=block.num_heads)
        x = add_norm(block.attention_norm, product(attended, block.attention_out), x, block.attention_out.bias)
        hidden = node("BiasGelu", [product(x, block.up), constant(block.up.bias)])
        x = add_norm(block.feed_forward_norm, product(hidden, block.down), x, block.down.bias)
    nodes[-1].output[0] = "x"
    ints, floats = 6, 1
    inputs = [helper.make_tensor_value_info(name, ints, ["B", "S"]) for name in ("tokens", "kinds", "mask")]
    output = helper.make_tensor_value_info("x", floats, ["B", "S", model.norm.shape[0]])
    graph = helper.make_graph(nodes, "bert", inputs, [output], weights)
    versions = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=versions, ir_version=8).SerializeToString()
