"""The results that a layer says it has: their tree, and the types of their arrays."""

import reprlib
from collections.abc import Sequence
from typing import Any

import jax
from jax.tree_util import tree_flatten, tree_flatten_with_path, tree_leaves

from .. import xla
from ..core import PyTree, ShapeAndDtype, Value, blaming, path_text, type_text
from ..transform import Settings, Structure
from . import _declarations as declarations, _rules as rules
from ._declarations import LayerClass


def result_types(
    cls: LayerClass, inputs: Structure, types: Sequence[ShapeAndDtype], refs: Sequence[int], settings: Settings
) -> tuple[Structure, Sequence[Any], bool]:
    """The tree of the results and the types of its arrays, on which `out_type` and `reference` agree, and whether there are Refs
    in the reference.
    """
    declared: dict[str, tuple[Structure, Sequence[Any]]] = {}
    layer, args, kwargs = inputs.build(types)
    if cls._has_own_out_type():
        with blaming(cls.__qualname__, "out_type", args, kwargs):
            out = layer.out_type(*args, **kwargs)
        declared["out_type"] = structure_of(out, f"{cls.__qualname__}.out_type")
    reference, has_refs = declarations.method(cls, "reference"), False
    if reference is not None:
        with blaming(cls.__qualname__, "reference", args, kwargs):
            tree, of_arrays, has_refs = rules.eval_type(cls, reference, inputs, types, refs)
        declared["reference"] = tree, of_arrays
    for function, (_, of_results) in declared.items():
        settings.check_widths(of_results, f"{cls.__qualname__}.{function}")
    (first, expected), *rest = declared.items()
    for other, got in rest:
        if expected[0] != got[0] or _texts(expected[1]) != _texts(got[1]):
            trees = ("", "") if expected[0] == got[0] else (f" in {expected[0]!r}", f" in {got[0]!r}")
            raise ValueError(
                f"{cls.__qualname__}: expected out_type and reference to agree; {first} says {_texts(expected[1])}"
                f"{trees[0]}, and {other} gives {_texts(got[1])}{trees[1]}."
            )
    return (*expected, has_refs)


def check_computes(cls: LayerClass, args: Sequence[Value], out: PyTree) -> None:
    """No kernel runs for results without arrays. Nobody means that if they are numbers of Python, which are static but look like
    arrays, or the `None` of a function without a `return`.
    """
    if out is None:
        function = "out_type" if declarations.method(cls, "reference") is None else "reference"
        raise TypeError(
            f"{cls.__qualname__}: {function} returned None; did it forget 'return'? A layer without results has a jax.Ref "
            "among its arguments, or says has_side_effect = True."
        )
    if not any(isinstance(leaf, int | float | complex) for leaf in tree_leaves(out)):
        return
    named = zip(declarations.names_of(cls, len(args)), args, strict=True)
    numbers = [
        f"{path_text(name, path)} = {leaf!r}"
        for name, arg in named
        for path, leaf in tree_flatten_with_path(arg)[0]
        if isinstance(leaf, int | float | complex)
    ]
    raise TypeError(
        f"{cls.__qualname__}: expected an array among the arguments; got {', '.join(numbers[:3]) or 'none'}. Python's numbers "
        f"are static, and the result would be {reprlib.repr(out)}, without a call of the kernel. Pass jnp.asarray(...)."
    )


def _texts(types: Sequence[ShapeAndDtype]) -> list[str]:
    return [type_text(leaf.dtype, leaf.shape) for leaf in types]


def structure_of(tree: PyTree, who: str) -> tuple[Structure, Sequence[Any]]:
    leaves, treedef = tree_flatten(tree)
    marked = [Structure.array if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else leaf for leaf in leaves]
    arrays = [leaf for leaf, mark in zip(leaves, marked, strict=True) if mark is Structure.array]
    if leaves and not arrays:
        raise TypeError(f"{who}: expected the types of arrays, `jax.ShapeDtypeStruct`s; got {tree!r}.")
    for leaf in arrays:
        try:
            xla.result_aval(leaf.shape, leaf.dtype)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{who}: expected the types of arrays; got {leaf!r} ({error}).") from None
    return Structure(treedef, marked, who), [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in arrays]


def pair(outputs: Structure, residuals: Structure) -> Structure:
    arrays = [Structure.array] * outputs.num_arrays, [Structure.array] * residuals.num_arrays
    leaves, treedef = tree_flatten((outputs.build(arrays[0]), residuals.build(arrays[1])))
    return Structure(treedef, leaves, "")
