"""Making a tree again in each call of a kernel, as fast as Python can."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
from jax.tree_util import tree_flatten, tree_unflatten

from ..core import PyTree


Build = Callable[[Sequence[Any]], Any]


@dataclasses.dataclass(frozen=True)
class Slot:
    """A leaf that stands for an array."""

    index: int


def builder(tree: PyTree) -> Build:
    """A function from arrays to `tree` with them in place of its `Slot`s.

    JAX's `tree_unflatten` does the same, and takes longer than a small kernel. So the function is made of source text, as
    Equinox makes those of its Modules.
    """
    source = _Source()
    result = source.expression(tree)
    text = "\n    ".join(["def build(a):", *source.lines, f"return {result}"])
    exec(compile(text, "<eqxcallback builder>", "exec"), source.names)
    return source.names["build"]


class _Source:
    """The body of a function, and the values that it refers to."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {
            "new": object.__new__,
            "set_field": object.__setattr__,
            "tree_unflatten": tree_unflatten,
        }

    def _name(self, value: object) -> str:
        name = f"v{len(self.names)}"
        self.names[name] = value
        return name

    def expression(self, tree: PyTree) -> str:
        """Lists and dicts are made anew each time: a kernel may change its own."""
        if isinstance(tree, Slot):
            return f"a[{tree.index}]"
        if tree is None:
            return "None"
        if type(tree) is tuple:
            return f"({''.join(f'{self.expression(child)}, ' for child in tree)})"
        if type(tree) is list:
            return f"[{', '.join(self.expression(child) for child in tree)}]"
        if type(tree) is dict:
            return f"{{{', '.join(f'{self._name(key)}: {self.expression(child)}' for key, child in tree.items())}}}"
        if isinstance(tree, eqx.Module):
            return self._module(tree)
        leaves, treedef = tree_flatten(tree)
        if treedef.num_nodes == 1 and leaves:
            return self._name(tree)
        return f"tree_unflatten({self._name(treedef)}, {self.expression(leaves)})"

    def _module(self, module: eqx.Module) -> str:
        """Write the lines that make a Module as Equinox does: no `__init__`, and the fields are set."""
        made = f"m{len(self.lines)}"
        self.lines.append(f"{made} = new({self._name(type(module))})")
        static = {field.name for field in dataclasses.fields(module) if field.metadata.get("static", False)}
        for name, value in vars(module).items():
            result = self._name(value) if name in static else self.expression(value)
            self.lines.append(f"set_field({made}, {name!r}, {result})")
        return made
