"""An exported program, which is called as the function was."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from ..core import PyTree
from ._portable import is_array_or_number, portable


class Program(jax.export.Exported):
    """A `jax.export.Exported` that takes the arguments of the function, Modules and static values as well."""

    @classmethod
    def of(cls, exported: jax.export.Exported) -> "Program":
        return cls(**{field.name: getattr(exported, field.name) for field in dataclasses.fields(exported)})

    def call(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        expected_args, expected_kwargs = self.in_tree.unflatten([0] * self.in_tree.num_leaves)
        if len(args) != len(expected_args) or kwargs.keys() != expected_kwargs.keys():
            raise TypeError(
                f"{self.fun_name}: expected {len(expected_args)} positional arguments and the keywords "
                f"{sorted(expected_kwargs)}, as the program was exported with; got {len(args)} and {sorted(kwargs)}."
            )
        args = tuple(map(_fitting, args, expected_args))
        kwargs = {name: _fitting(value, expected_kwargs[name]) for name, value in kwargs.items()}
        if jax.tree.structure((args, kwargs)) != self.in_tree:
            raise TypeError(f"{self.fun_name}: {_difference((args, kwargs), (expected_args, expected_kwargs))}")
        return super().call(*args, **kwargs)

    __call__ = call


def _fitting(argument: PyTree, expected: PyTree) -> PyTree:
    """A Python number is static, unless the program has an array in its place."""
    traced = portable(argument, is_array_or_number)
    return traced if jax.tree.structure(traced) == jax.tree.structure(expected) else portable(argument)


def _difference(
    got: tuple[Sequence[PyTree], Mapping[str, PyTree]], expected: tuple[Sequence[PyTree], Mapping[str, PyTree]]
) -> str:
    there, wanted = _paths(got), _paths(expected)
    missing, unexpected = [path for path in wanted if path not in there], [path for path in there if path not in wanted]
    if not (missing or unexpected):
        return f"expected arguments of the tree {jax.tree.structure(expected)}; got {jax.tree.structure(got)}."
    return (
        f"expected the arguments that the program was exported with; missing {_some(missing)}; unexpected {_some(unexpected)}. "
        "What is not an array is part of the program: export one for each value, or pass an array."
    )


def _paths(arguments: tuple[Sequence[PyTree], Mapping[str, PyTree]]) -> list[str]:
    args, kwargs = arguments
    named = {
        **{f"args[{i}]": arg for i, arg in enumerate(args)},
        **{f"kwargs[{name!r}]": arg for name, arg in kwargs.items()},
    }
    return [
        name + keystr(path)
        for name, argument in named.items()
        for path, _ in tree_flatten_with_path(argument, is_leaf=lambda leaf: leaf is None)[0]
    ]


def _some(paths: Sequence[str]) -> str:
    return ", ".join([*paths[:3], *(["..."] if len(paths) > 3 else [])]) or "nothing"
