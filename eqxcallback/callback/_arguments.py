"""The arguments of a callback, checked against its signature and against what kernels are given."""

import inspect
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.tree_util import tree_flatten_with_path

from .. import xla
from ..core import Leaf, PyTree, path_text, ref_text


def check_signature(
    signature: inspect.Signature, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], who: str
) -> None:
    try:
        signature.bind(None, None, *args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"{who}: the callback's signature is {signature}, of which JAX gives ctx and out; the call gave {len(args)} "
            f"positional arguments and the keywords {sorted(kwargs)} ({error})."
        ) from None


# Whose instances JAX takes for arrays, if their dtype is one of its own. Grows: to ask JAX costs microseconds.
_array_types: set[type] = {np.ndarray}


def are_arrays(leaves: Sequence[Any]) -> bool:
    """True if it is plain that a kernel can be given all of `leaves`."""
    return all(type(leaf) in _array_types and leaf.dtype in xla.KERNEL_DTYPES for leaf in leaves)


def check_leaves(
    signature: inspect.Signature | None, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], who: str
) -> None:
    """Each leaf is an array, or a number, of a dtype that kernels are given.

    **Raises:** `TypeError`, naming the leaf, what was expected and what was given.
    """
    for path, _, leaf in _named_leaves(signature, args, kwargs):
        if isinstance(leaf, jax.Array | np.ndarray | np.generic):
            if not isinstance(leaf, Tracer):  # a tracer may be one of a Ref's
                _array_types.add(type(leaf))
            got, problem = f"{type(leaf).__name__} of dtype {leaf.dtype}", xla.dtype_problem(leaf.dtype)
        else:
            got = ref_text(leaf) or f"{reprlib.repr(leaf)} of type {type(leaf).__name__}"
            problem = _problem(leaf)
        if problem is not None:
            raise TypeError(f"{who}: expected {path} to be an array or a number; got {got}. {problem}.")


def check_places(
    error: ValueError,
    signature: inspect.Signature | None,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    who: str,
) -> None:
    """Raise the `ValueError` that names two arrays, if `error` is JAX's because they are on different devices."""
    xla.check_devices(error, who, ((path, leaf) for path, _, leaf in _named_leaves(signature, args, kwargs)))


def inputs(signature: inspect.Signature | None, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> list[Leaf]:
    """The flat arguments, with the name of the parameter that each one belongs to."""
    leaves = []
    for path, root, leaf in _named_leaves(signature, args, kwargs):
        aval = jax.typeof(leaf)
        leaves.append(Leaf(path, root, aval.shape, aval.dtype))
    return leaves


def _named_leaves(
    signature: inspect.Signature | None, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> list[tuple[str, str, Any]]:
    """The path of each flat argument, the parameter that it belongs to, and itself."""
    positional: list[str] = []
    if signature is not None:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        positional = [p.name for p in signature.parameters.values() if p.kind in kinds][2:]
    roots = [positional[i] if i < len(positional) else f"args[{i}]" for i in range(len(args))]
    named = [*zip(roots, args, strict=True), *sorted(kwargs.items())]
    return [
        (path_text(root, path), root, leaf) for root, value in named for path, leaf in tree_flatten_with_path(value)[0]
    ]


def _problem(leaf: object) -> str | None:
    if ref_text(leaf) is not None:
        return "Pass the values there, ref[...]: a Layer takes Refs, a callback does not"
    try:
        jax.typeof(leaf)
    except TypeError:
        return "Pass arrays only, and give the callback anything else with functools.partial"
    return None
