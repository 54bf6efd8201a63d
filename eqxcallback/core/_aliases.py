"""`input_output_aliases`: which outputs overwrite which inputs, as users state it and as programs need it."""

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from jax.tree_util import keystr

from ._errors import type_text
from ._types import DType, KeyPath, Size


# A Mapping's keys are invariant: hence three.
Aliases = Mapping[int, int | str] | Mapping[str, int | str] | Mapping[int | str, int | str]


class Leaf:
    """One flat argument or result: where it stands in its tree, and its type."""

    def __init__(self, path: str, root: object, shape: tuple[Size, ...], dtype: DType):
        self.path = path
        self.root = root
        self.shape = shape
        self.dtype = dtype

    def __str__(self) -> str:
        return f"{self.path} of type {type_text(self.dtype, self.shape)}"


def resolve_aliases(
    aliases: Aliases, inputs: Sequence[Leaf], outputs: Sequence[Leaf], who: str
) -> tuple[tuple[int, int], ...]:
    """Pairs of flat input and output indices.

    **Arguments:**

    - `aliases`: maps inputs to the outputs that overwrite them. An input is a flat index, or the name of a parameter, which
        covers all leaves of that argument. An output is a flat index, or a name (the key or field of a result); leaves
        of a name are paired, in order, with the output leaves from there on.
    - `who`: begins each error.

    **Raises:** `TypeError` or `ValueError`, naming the leaf, what was expected and what was given.
    """
    pairs: list[tuple[int, int]] = []
    for source, target in aliases.items():
        sources = _locate(source, inputs, f"{who}: input_output_aliases has the input", "inputs")
        targets = _locate(target, outputs, f"{who}: input_output_aliases has the output", "outputs")
        first = targets[0]
        pairs.extend((index, first + offset) for offset, index in enumerate(sources))
    check_alias_pairs(pairs, inputs, outputs, who)
    return tuple(sorted(pairs))


def check_alias_pairs(
    pairs: Sequence[tuple[int, int]], inputs: Sequence[Leaf], outputs: Sequence[Leaf], who: str
) -> None:
    """Each input and output once, and both of one type."""
    used_inputs: set[int] = set()
    used_outputs: set[int] = set()
    for i, o in pairs:
        if o >= len(outputs):
            raise ValueError(f"{who}: input_output_aliases pairs {inputs[i].path} with an output past the last one.")
        for used, index, kind, leaf in ((used_inputs, i, "input", inputs[i]), (used_outputs, o, "output", outputs[o])):
            if index in used:
                raise ValueError(
                    f"{who}: input_output_aliases uses the {kind} {leaf.path} twice. An output can overwrite one input, "
                    "and an input can be overwritten by one output."
                )
            used.add(index)
        if inputs[i].shape != outputs[o].shape or inputs[i].dtype != outputs[o].dtype:
            raise ValueError(
                f"{who}: input_output_aliases lets an output overwrite an input of another type: input {inputs[i]}, "
                f"output {outputs[o]}. Both need the same shape and dtype."
            )


def check_aliases(aliases: object, who: str) -> Aliases:
    """The part that needs no arguments: a mapping between non-negative integers or names."""
    if not isinstance(aliases, Mapping):
        raise TypeError(f"{who}: expected input_output_aliases to be a mapping; got {type(aliases).__name__}.")
    for kind, keys in (("input", aliases.keys()), ("output", aliases.values())):
        for key in keys:
            if isinstance(key, bool) or not isinstance(key, (numbers.Integral, str)):
                raise TypeError(
                    f"{who}: expected each {kind} in input_output_aliases to be a flat index (int) or a name (str); "
                    f"got {key!r} of type {type(key).__name__}."
                )
            if isinstance(key, numbers.Integral) and int(key) < 0:
                raise ValueError(f"{who}: expected non-negative indices in input_output_aliases; got the {kind} {key}.")

    def index(key: Any) -> Any:
        return key if isinstance(key, str) else int(key)

    return {index(source): index(target) for source, target in aliases.items()}


def root_name(path: KeyPath) -> object:
    """The name of the outermost step into a result: a dict key, a field, or a position."""
    if not path:
        return None
    step = path[0]
    for attribute in ("key", "name", "idx"):
        if hasattr(step, attribute):
            return getattr(step, attribute)
    return None


def path_text(root: str, path: KeyPath) -> str:
    return root + keystr(path)


def _locate(key: int | str, leaves: Sequence[Leaf], error: str, kind: str) -> list[int]:
    if isinstance(key, int):
        if key < len(leaves):
            return [key]
        paths = ", ".join(f"{i}: {leaf.path}" for i, leaf in enumerate(leaves)) or "none"
        raise ValueError(f"{error} {key}, but there are {len(leaves)} flat {kind} ({paths}).")
    positions = [index for index, leaf in enumerate(leaves) if leaf.root == key]
    if not positions:
        names = ", ".join(sorted({str(leaf.root) for leaf in leaves if isinstance(leaf.root, str)})) or "none"
        raise ValueError(f"{error} {key!r}, which is not the name of an array among the {kind} (names: {names}).")
    return positions
