"""Functions that have `jax.Ref`s of their own, as what they are from outside: functions of arrays."""

from collections.abc import Callable
from typing import Any

import jax

# `jax._src.core.internal_mutable_array_effect`: tells a jaxpr with Refs of its own from others.
# Noticed by: tests/xla/test_private_jax.py.
from jax._src.core import internal_mutable_array_effect as _of_refs

# `jax._src.state.discharge`: JAX makes values of Refs when it lowers a program, and has no public way to do so before. Our calls
# have JVP rules alone, and `jax.linearize` and `jax.grad` lose what such a rule writes into a Ref.
# Noticed by: tests/xla/test_private_jax.py and tests/layer/test_refs_inside.py.
from jax._src.state import discharge as _discharge
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun
from jax.tree_util import tree_flatten, tree_structure, tree_unflatten


def eval_shape(function: Callable[..., Any], *args: Any) -> tuple[Any, bool]:
    """Return what `jax.eval_shape` does, and whether the function has Refs of its own. That costs nothing: both trace it once."""
    jaxpr, types = jax.make_jaxpr(function, return_shape=True)(*args)
    return types, _of_refs in jaxpr.effects


def without_refs(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose own Refs are values. Other effects stay. A function that has none is traced once more, the first time."""
    has_refs: dict[Any, bool] = {}  # by the tree of the arguments, in which tangents may be `None`

    def of_values(*args: Any) -> Any:
        leaves, treedef = tree_flatten(args)
        # Values that are known stay known, and without others Refs lose nothing.
        traced = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tracer)]
        if not traced or not has_refs.get(treedef, True):
            return function(*args)

        def of_traced(*values: Any) -> Any:
            merged = list(leaves)
            for i, value in zip(traced, values, strict=True):
                merged[i] = value
            return function(*tree_unflatten(treedef, merged))

        values = [leaves[i] for i in traced]
        jaxpr, types = jax.make_jaxpr(of_traced, return_shape=True)(*values)
        has_refs[treedef] = _of_refs in jaxpr.effects
        if not has_refs[treedef]:
            return function(*args)
        # What JAX would lower on the way may have derivatives of its own.
        pure = _discharge.discharge_state(jaxpr, should_discharge=False, lower=False)
        return tree_unflatten(tree_structure(types), jaxpr_as_fun(pure)(*values))

    return of_values
