"""A PyTree with some of its nodes made anew, and everything else the very same."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.tree_util import keystr, tree_flatten_with_path, tree_unflatten

from ..core import PyTree


class Place(NamedTuple):
    """**Attributes:** `path`, as `jax.tree_util.keystr` writes it; `above`: the nodes that one there is in."""

    path: str
    above: tuple[PyTree, ...]


def rebuilt(tree: PyTree, replace: Callable[[PyTree, Sequence[Place]], PyTree]) -> PyTree:
    """`tree` with `replace(node, places)` for each node, the inner ones first.

    A node that is in several places is replaced once, so that it stays one. Nodes in which nothing changes are kept.

    **Arguments:**

    - `replace`: gets a node that already has its new children, and all its places, in nodes that do not.
    """
    # By `id`. The originals are kept alive: another object might get the `id` of one that is gone.
    known: dict[int, tuple[PyTree, Sequence[tuple[Any, PyTree]], Any]] = {}
    places: dict[int, list[Place]] = defaultdict(list)
    done: dict[int, PyTree] = {}

    def find(node: PyTree, path: str, above: tuple[PyTree, ...]) -> None:
        if id(node) not in known:
            children, treedef = tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
            is_leaf = len(children) == 1 and children[0][1] is node
            known[id(node)] = node, [] if is_leaf else children, treedef
        places[id(node)].append(Place(path, above))
        for key, child in known[id(node)][1]:
            find(child, path + keystr(key), (*above, node))

    def walk(node: PyTree) -> PyTree:
        if id(node) not in done:
            done[id(node)] = replace(with_new_children(node), places[id(node)])
        return done[id(node)]

    def with_new_children(node: PyTree) -> PyTree:
        _, children, treedef = known[id(node)]
        new = [walk(child) for _, child in children]
        same = all(a is b for a, (_, b) in zip(new, children, strict=True))
        return node if same else tree_unflatten(treedef, new)

    find(tree, "", ())
    return walk(tree)
