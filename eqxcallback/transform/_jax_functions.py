"""`JaxKernel`s as functions of flat arrays: `function(operands, result_avals)`, checked to return arrays of these types."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.tree_util import tree_leaves, tree_map

from ..core import Aval, Value, type_text
from ._structure import is_array


Function = Callable[[Sequence[Value], Sequence[Aval]], Sequence[Value]]


def jax_forward(call: Callable[[Sequence[object]], Any], who: str) -> Function:
    """**Arguments:** `call` takes the operands, and returns the tree of the results."""

    def function(operands: Sequence[Value], result_avals: Sequence[Aval]) -> Sequence[Value]:
        if result_avals and all(0 in aval.shape for aval in result_avals):  # calls in it may have no launch for that
            return [jnp.zeros(aval.shape, aval.dtype) for aval in result_avals]
        results = [leaf for leaf in tree_leaves(call(operands)) if is_array(leaf)]
        if _types(results) != _types(result_avals):
            raise TypeError(f"{who}: expected results of types {_types(result_avals)}; got {_types(results)}.")
        return results

    return function


def jax_backward(call: Callable[[Sequence[object]], tuple[Any, Any]], needs_grad: Sequence[int], who: str) -> Function:
    """**Arguments:** `call` takes the operands, and returns the tree of the gradients, and the same tree with the operands'
    numbers where a gradient is needed, and `None` elsewhere.
    """

    def function(operands: Sequence[Value], result_avals: Sequence[Aval]) -> Sequence[Value]:
        gradients, numbers = call(operands)
        by_operand: dict[int, Any] = {}

        def note(gradient: Value, part: Value) -> None:
            by_operand.update((i, gradient) for i in tree_leaves(part))

        arrays = tree_map(lambda leaf: leaf if is_array(leaf) else None, gradients)
        try:
            tree_map(note, arrays, numbers, is_leaf=lambda leaf: leaf is None)
        except ValueError as error:
            raise TypeError(f"{who}: expected gradients in the tree of the arguments; {error}") from error
        got = [_summed(by_operand[i], aval) for i, aval in zip(needs_grad, result_avals, strict=True)]
        if _types(got) != _types(result_avals):
            raise TypeError(
                f"{who}: expected gradients of types {_types(result_avals)}, of those that are needed; got {_types(got)}."
            )
        return got

    return function


def _summed(gradient: Value, aval: Aval) -> Value:
    """Over leading axes that the operand lacks, as `grad.write` of other kernels does."""
    if gradient is None:
        return None
    more = gradient.ndim - len(aval.shape)
    return gradient.sum(range(more)) if more > 0 and gradient.shape[more:] == aval.shape else gradient


def _types(leaves: Sequence[Value]) -> str:
    texts = ["None" if leaf is None else type_text(leaf.dtype, leaf.shape) for leaf in leaves]
    return f"({', '.join(texts)})"
