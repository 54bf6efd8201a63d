"""ONNX graphs, and onnxruntime to run them: a peer. Raises where onnx or onnxruntime is not installed."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


# The domain of onnxruntime's own operators. Those of ONNX have none.
OWN = "com.microsoft"
# Types of ONNX's tensors.
FLOAT, INT32 = 1, 6


class Graph:
    """A graph, made node by node."""

    def __init__(self) -> None:
        self._helper, self._numpy_helper = (
            importlib.import_module(f"onnx.{name}") for name in ("helper", "numpy_helper")
        )
        self.nodes: list[Any] = []
        self._constants: list[Any] = []

    def constant(self, value: Any) -> str:
        name = f"w{len(self._constants)}"
        self._constants.append(self._numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def node(
        self, operator: str, inputs: Sequence[str], outputs: int = 1, domain: str = OWN, **attributes: Any
    ) -> list[str]:
        """Return the names of the results."""
        names = [f"{operator}{len(self.nodes)}.{i}" for i in range(outputs)]
        self.nodes.append(self._helper.make_node(operator, inputs, names, domain=domain, **attributes))
        return names

    def session(
        self, inputs: Mapping[str, tuple[int, Sequence[Any]]], result: tuple[str, Sequence[Any]], threads: int
    ) -> Any:
        """Return a session. `inputs`: types and shapes by name. `result`: a name for the last node's, and its shape."""
        name, shape = result
        self.nodes[-1].output[0] = name
        values = [self._helper.make_tensor_value_info(key, *of_key) for key, of_key in inputs.items()]
        output = self._helper.make_tensor_value_info(name, FLOAT, shape)
        graph = self._helper.make_graph(self.nodes, "benchmark", values, [output], self._constants)
        versions = [self._helper.make_opsetid("", 18), self._helper.make_opsetid(OWN, 1)]
        model = self._helper.make_model(graph, opset_imports=versions, ir_version=8)
        runtime = importlib.import_module("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        return runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
