"""A PyTree with some of its nodes made anew, and everything else the very same."""

from collections.abc import Callable
from typing import Any

from jax.tree_util import tree_flatten_with_path, tree_unflatten

from ..core import PyTree


Path = tuple[Any, ...]


def rebuilt(tree: PyTree, replace: Callable[[Path, PyTree, tuple[PyTree, ...]], PyTree]) -> PyTree:
    """`tree` with `replace(path, node, above)` for each node, the inner ones first.

    A node that is in several places is replaced once, so that it stays one. Nodes in which nothing changes are kept.

    **Arguments:**

    - `replace`: gets a node that already has its new children, and the nodes that it is in, which do not.
    """
    # The originals are kept alive: another object might get the `id` of one that is gone.
    done: dict[int, tuple[PyTree, PyTree]] = {}

    def walk(node: PyTree, path: Path, above: tuple[PyTree, ...]) -> PyTree:
        if id(node) not in done:
            done[id(node)] = node, replace(path, with_children(node, path, above), above)
        return done[id(node)][1]

    def with_children(node: PyTree, path: Path, above: tuple[PyTree, ...]) -> PyTree:
        children, treedef = tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
        if len(children) == 1 and children[0][1] is node:
            return node
        new = [walk(child, (*path, *key), (*above, node)) for key, child in children]
        same = all(a is b for a, (_, b) in zip(new, children, strict=True))
        return node if same else tree_unflatten(treedef, new)

    return walk(tree, (), ())
