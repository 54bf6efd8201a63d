"""The functions of a layer that are JAX: on flat arrays, of one example."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_pytree_node_class, tree_flatten, tree_leaves, tree_map, tree_structure

from .. import xla
from ..core import PyTree, ShapeAndDtype, Size, Value, type_text
from ..transform import Structure, is_array
from . import _declarations as declarations
from ._bodies import LayerBackward
from ._declarations import LayerClass
from ._refs import new


@register_pytree_node_class
class Arguments(tuple[Any, ...]):
    """The arguments of a call, or what belongs to them: a tuple, and a PyTree. What belongs to the layer is its attribute
    `self`.
    """

    _own: Any
    was_asked = False

    @classmethod
    def of(cls, of_layer: Any, arguments: Sequence[object]) -> "Arguments":
        made = cls(arguments)
        made._own = of_layer
        return made

    @property
    def self(self) -> Any:
        self.was_asked = True
        return self._own

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return tuple(self), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Sequence[object]) -> "Arguments":
        return cls(children)


def eval_type(
    cls: LayerClass, function: Any, inputs: Structure, types: Sequence[ShapeAndDtype], refs: Sequence[int]
) -> tuple[Structure, Sequence[Any], bool]:
    """The tree of what a method in JAX returns, the types of its arrays, and whether there are Refs in it."""
    structures: list[Structure] = []

    def flat(*arrays: Value) -> Sequence[Value]:
        layer, args, kwargs = inputs.build(new(arrays, refs))
        leaves, treedef = tree_flatten(function(layer, *args, **kwargs))
        structures.append(Structure(treedef, leaves, f"{cls.__qualname__}.{function.__name__}"))
        return [leaf for leaf in leaves if is_array(leaf)]

    with xla.no_mesh():
        types, has_refs = xla.eval_shape(flat, *types)
    return structures[0], [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in types], has_refs


@dataclasses.dataclass(frozen=True, eq=False)
class Functions:
    cls: LayerClass
    inputs: Structure
    outputs: Structure
    input_keys: dict[int, str]
    output_keys: dict[int, str]
    result_types: tuple[ShapeAndDtype, ...]
    keywords: tuple[str, ...]
    refs: tuple[int, ...]

    def _build(self, arrays: Sequence[Value]) -> tuple[PyTree, tuple[PyTree, ...], dict[str, PyTree]]:
        return self.inputs.build(wrapped(arrays, self.input_keys))

    def _arguments(self, tree: tuple[PyTree, tuple[PyTree, ...], dict[str, PyTree]]) -> Arguments:
        layer, args, kwargs = tree
        return Arguments.of(layer, (*args, *(kwargs[name] for name in self.keywords)))

    def _flat(self, out: PyTree) -> Sequence[Value]:
        leaves = [leaf for leaf in tree_leaves(out) if is_array(leaf)]
        return unwrapped(leaves, self.output_keys)

    def reference(self, *arrays: Value) -> Sequence[Value]:
        mutable = new(arrays, self.refs)
        layer, args, kwargs = self._build(mutable)
        function: Any = declarations.method(self.cls, "reference")
        out = self._flat(function(layer, *args, **kwargs))
        return [*out, *(mutable[i][...] for i in self.refs)]

    def kernel(self, function: Any, operands: Sequence[Value]) -> Sequence[Value]:
        """The results of a `JaxKernel`'s function, then the new values of `refs`, then the residuals."""
        mutable = new(operands, self.refs)
        layer, args, kwargs = self._build(mutable)
        leaves = [leaf for leaf in tree_leaves(function(layer, *args, **kwargs)) if is_array(leaf)]
        count = len(self.result_types)
        return unwrapped([*leaves[:count], *(mutable[i][...] for i in self.refs), *leaves[count:]], self.output_keys)

    def backward_kernel(
        self, function: Any, body: LayerBackward, needs_grad: Sequence[int], operands: Sequence[Value]
    ) -> tuple[Any, Any]:
        """The gradients that a `JaxKernel`'s function returns, and a tree like theirs that has the numbers of `needs_grad`."""
        count = self.inputs.num_arrays
        keys = self.input_keys | {count + i: impl for i, impl in self.output_keys.items()}
        layer, numbers, args, out, cotangents = body.arguments(needs_grad, wrapped(operands, keys))
        return function(layer, args, out, cotangents), numbers

    def jvp(self, primals: Sequence[Value], tangents: Sequence[Value]) -> Sequence[Value]:
        """Return the tangents of the results of floating type, and zeros for others."""
        args = self._arguments(self._build(primals))
        layer = args.self
        filled = [
            _zero(primal) if tangent is None else tangent
            for primal, tangent in zip(wrapped(primals, self.input_keys), tangents, strict=True)
        ]
        directions = self._arguments(self.inputs.build_alone(filled))
        function: Any = declarations.method(self.cls, "jvp")
        result = function(layer, args, directions)
        if not directions.was_asked and any(tangent is not None for tangent in tangents[: _num_arrays(layer)]):
            raise ValueError(
                f"{self.cls.__qualname__}: the layer's own arrays are differentiated, but jvp does not use their tangents. They "
                "are `tangents.self`, with the tree of the layer."
            )
        return self._out_tangents(result)

    def _out_tangents(self, result: Any) -> Sequence[Value]:
        """A rule returns the tangents, or `(out, tangents)` as those of `jax.custom_jvp` do: their trees differ."""
        marks = [_Result(i) for i in range(self.outputs.num_arrays)]
        expected, tree = tree_flatten(self.outputs.build(marks), is_leaf=_is_none)
        if isinstance(result, tuple) and len(result) == 2 and tree_structure(result[1], is_leaf=_is_none) == tree:
            result = result[1]
        leaves, got = tree_flatten(result, is_leaf=_is_none)
        who = f"{self.cls.__qualname__}.jvp"
        if got != tree:
            raise ValueError(f"{who}: expected tangents in the tree of the results, {tree}; got {got}.")
        by_result = {mark.index: leaf for mark, leaf in zip(expected, leaves, strict=True) if isinstance(mark, _Result)}
        tangents = []
        for i, aval in enumerate(self.result_types):
            leaf = by_result[i]
            if leaf is None or not jnp.issubdtype(aval.dtype, jnp.inexact):
                leaf = jnp.zeros(aval.shape, aval.dtype)
            elif not is_array(leaf):
                leaf = jnp.asarray(leaf, aval.dtype)
            if (leaf.shape, leaf.dtype) != (aval.shape, aval.dtype):
                raise ValueError(
                    f"{who}: expected a tangent of type {type_text(aval.dtype, aval.shape)}; got "
                    f"{type_text(leaf.dtype, leaf.shape)}."
                )
            tangents.append(leaf)
        return tangents

    def batch(self, axis_size: Size, arrays: Sequence[Value], is_mapped: Sequence[bool]) -> Any:
        """`None` if arrays of the layer itself are mapped: the rule is about the arguments."""
        args = self._arguments(self._build(arrays))
        layer = args.self
        if any(is_mapped[: _num_arrays(layer)]):
            return None
        in_axes = self._arguments(self.inputs.build_alone([0 if mapped else None for mapped in is_mapped]))
        function: Any = declarations.method(self.cls, "batch")
        result = function(layer, axis_size, tuple(in_axes), args)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"{self.cls.__qualname__}.batch: expected (out, out_axes) to be returned; got {result!r}.")
        return self._mapped_results(*result, axis_size)

    def _mapped_results(self, out: PyTree, out_axes: Any, axis_size: Size) -> tuple[Sequence[Value], Sequence[bool]]:
        """`out_axes` is as of `jax.vmap`, or has booleans as `jax.custom_batching.custom_vmap` has them."""
        who = f"{self.cls.__qualname__}.batch"
        if tree_structure(out) != self.outputs.treedef:
            raise ValueError(f"{who}: expected results in the tree {self.outputs.treedef}; got {tree_structure(out)}.")
        try:
            axes_tree = tree_map(
                lambda axis, part: tree_map(lambda _: _Axis(axis), part), out_axes, out, is_leaf=_is_none
            )
        except ValueError as error:
            raise ValueError(
                f"{who}: expected out_axes to be a prefix of the results; got {out_axes!r} ({error})."
            ) from None
        pairs = [
            (leaf, mark.axis)
            for leaf, mark in zip(tree_leaves(out), tree_leaves(axes_tree), strict=True)
            if is_array(leaf)
        ]
        leaves = [leaf if axis in (None, 0) else jnp.moveaxis(leaf, axis, 0) for leaf, axis in pairs]
        expected = [
            ((*([axis_size] if axis is not None else []), *aval.shape), aval.dtype)
            for aval, (_, axis) in zip(self.result_types, pairs, strict=False)
        ]
        if len(leaves) != len(self.result_types) or [(leaf.shape, leaf.dtype) for leaf in leaves] != expected:
            raise ValueError(
                f"{who}: expected {', '.join(type_text(dtype, shape) for shape, dtype in expected)}; got "
                f"{', '.join(type_text(leaf.dtype, leaf.shape) for leaf in leaves)} of {len(self.result_types)} results."
            )
        return unwrapped(leaves, self.output_keys), [axis is not None for _, axis in pairs]


class _Result:
    """A leaf that stands for a result."""

    def __init__(self, index: int):
        self.index = index


class _Axis:
    """A leaf. `None` and `False` stand for no axis, `True` for the first one."""

    def __init__(self, mark: Any):
        self.axis = None if mark is None or mark is False else 0 if mark is True else int(mark)


def _zero(primal: Value) -> Value:
    """The tangent of nothing, as JAX has it: of integers and keys, it is of `float0`."""
    if jnp.issubdtype(primal.dtype, jnp.inexact):
        return jnp.zeros_like(primal)
    return np.zeros(primal.shape, jax.dtypes.float0)


def _num_arrays(tree: PyTree) -> int:
    return sum(map(is_array, tree_leaves(tree)))


def _is_none(leaf: object) -> bool:
    return leaf is None


def wrapped(arrays: Sequence[Value], keys: dict[int, str]) -> Sequence[Value]:
    if not keys:
        return arrays
    return [jax.random.wrap_key_data(a, impl=keys[i]) if i in keys else a for i, a in enumerate(arrays)]


def unwrapped(arrays: Sequence[Value], keys: dict[int, str]) -> Sequence[Value]:
    if not keys:
        return arrays
    return [jax.random.key_data(a) if i in keys else a for i, a in enumerate(arrays)]
