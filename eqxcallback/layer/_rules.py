"""The functions of a layer that are JAX: on flat arrays, of one example."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import tree_flatten, tree_leaves, tree_map, tree_structure

from ..op import Structure, is_array
from . import _declarations as declarations


class Tangents(tuple[Any, ...]):
    """The tangents of a call's arguments, in their tree: zeros filled in, `None` where there is none. Those of the layer's own
    arrays are the attribute `self`.
    """

    _own: Any
    was_asked: bool

    @property
    def self(self) -> Any:
        self.was_asked = True
        return self._own


def eval_type(cls: Any, function: Any, inputs: Structure, types: Sequence[Any]) -> tuple[Structure, Sequence[Any]]:
    """The tree of what a method in JAX returns, and the types of its arrays."""
    found: list[Structure] = []

    def flat(*arrays: Any) -> Sequence[Any]:
        layer, args, kwargs = inputs.build(arrays)
        leaves, treedef = tree_flatten(function(layer, *args, **kwargs))
        found.append(Structure(treedef, leaves, f"{cls.__qualname__}.{function.__name__}"))
        return [leaf for leaf in leaves if is_array(leaf)]

    types = jax.eval_shape(flat, *types)
    return found[0], [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in types]


@dataclasses.dataclass(frozen=True, eq=False)
class Functions:
    cls: Any
    inputs: Structure
    outputs: Structure
    input_keys: dict[int, str]
    output_keys: dict[int, str]
    input_types: tuple[Any, ...]
    result_types: tuple[Any, ...]

    def _build(self, arrays: Sequence[Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        return self.inputs.build(wrapped(arrays, self.input_keys))

    def _flat(self, out: Any) -> Sequence[Any]:
        leaves = [leaf for leaf in tree_leaves(out) if is_array(leaf)]
        return unwrapped(leaves, self.output_keys)

    def reference(self, *arrays: Any) -> Sequence[Any]:
        layer, args, kwargs = self._build(arrays)
        function: Any = declarations.method(self.cls, "reference")
        return self._flat(function(layer, *args, **kwargs))

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        """Of the results of floating type; zeros for others."""
        layer, args, kwargs = self._build(primals)
        filled = [
            jnp.zeros_like(primal) if tangent is None and jnp.issubdtype(primal.dtype, jnp.inexact) else tangent
            for primal, tangent in zip(primals, tangents, strict=True)
        ]
        own, given, named = self.inputs.build_alone(filled)
        directions = Tangents((*given, *named.values()))
        directions._own, directions.was_asked = own, False
        function: Any = declarations.method(self.cls, "jvp")
        result = function(layer, (*args, *kwargs.values()), directions)
        num_own = len([leaf for leaf in tree_leaves(layer) if is_array(leaf)])
        if not directions.was_asked and any(tangent is not None for tangent in tangents[:num_own]):
            raise ValueError(
                f"{self.cls.__qualname__}: the layer's own arrays are differentiated, but jvp does not use their tangents. They "
                "are `tangents.self`, with the tree of the layer."
            )
        return self._out_tangents(result)

    def _out_tangents(self, result: Any) -> Sequence[Any]:
        """A rule returns the tangents, or `(out, tangents)` as those of `jax.custom_jvp` do: their trees differ."""
        expected = tree_structure(self.outputs.build_alone([0] * self.outputs.num_arrays), is_leaf=_is_none)
        if isinstance(result, tuple) and len(result) == 2:
            alone = tree_map(lambda leaf: leaf if is_array(leaf) else None, result[1])
            if tree_structure(alone, is_leaf=_is_none) == expected:
                result = result[1]
        result = tree_map(lambda leaf: leaf if is_array(leaf) else None, result)
        leaves, tree = tree_flatten(result, is_leaf=_is_none)
        if tree != expected:
            raise ValueError(
                f"{self.cls.__qualname__}: expected jvp to return tangents in the tree of the results, {expected}; got {tree}."
            )
        marks = tree_leaves(self.outputs.build_alone(range(self.outputs.num_arrays)), is_leaf=_is_none)
        by_result = {mark: leaf for mark, leaf in zip(marks, leaves, strict=True) if mark is not None}
        return [
            jnp.zeros(aval.shape, aval.dtype)
            if (leaf := by_result[i]) is None or not jnp.issubdtype(aval.dtype, jnp.inexact)
            else jnp.asarray(leaf, aval.dtype)
            for i, aval in enumerate(self.result_types)
        ]

    def batch(self, axis_size: int, arrays: Sequence[Any], is_mapped: Sequence[bool]) -> Any:
        """`None` if arrays of the layer itself are mapped: the rule is about the arguments."""
        layer, args, kwargs = self._build(arrays)
        num_own = len([leaf for leaf in tree_leaves(layer) if is_array(leaf)])
        if any(is_mapped[:num_own]):
            return None
        _, in_axes, named = self.inputs.build_alone([0 if mapped else None for mapped in is_mapped])
        function: Any = declarations.method(self.cls, "batch")
        out, out_axes = function(layer, axis_size, (*in_axes, *named.values()), (*args, *kwargs.values()))
        leaves = self._flat(out)
        axes = self._axes(out_axes)
        moved = [
            leaf if axis in (None, 0) else jnp.moveaxis(leaf, axis, 0) for leaf, axis in zip(leaves, axes, strict=True)
        ]
        return moved, [axis is not None for axis in axes]

    def _axes(self, out_axes: Any) -> Sequence[int | None]:
        """Of the flat results. As `out_axes` of `jax.vmap`, or booleans as `jax.custom_batching.custom_vmap` has them."""

        def axis(mark: Any) -> Any:
            return None if mark is None or mark is False else 0 if mark is True else int(mark)

        if out_axes is None or isinstance(out_axes, int):
            return [axis(out_axes)] * self.outputs.num_arrays
        marks = tree_leaves(out_axes, is_leaf=_is_none)
        return [axis(mark) for mark in marks]


def _is_none(leaf: Any) -> bool:
    return leaf is None


def wrapped(arrays: Sequence[Any], keys: dict[int, str]) -> Sequence[Any]:
    if not keys:
        return arrays
    return [jax.random.wrap_key_data(a, impl=keys[i]) if i in keys else a for i, a in enumerate(arrays)]


def unwrapped(arrays: Sequence[Any], keys: dict[int, str]) -> Sequence[Any]:
    if not keys:
        return arrays
    return [jax.random.key_data(a) if i in keys else a for i, a in enumerate(arrays)]
