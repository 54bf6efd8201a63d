"""Count the parameters of a model."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp


def of_model(model: Any) -> int:
    """An array that is in several places counts once."""
    arrays = filter(is_parameter, jax.tree.leaves(model, is_leaf=_is_state))
    return sum({id(array): array.size for array in arrays}.values())


def of_module(module: eqx.Module) -> int:
    """Count the parameters of a Module without those of the Modules in it."""
    if _is_state(module):
        return 0
    leaves = jax.tree.leaves(module, is_leaf=lambda node: node is not module and isinstance(node, eqx.Module))
    return of_model([leaf for leaf in leaves if not isinstance(leaf, eqx.Module)])


def is_parameter(leaf: Any) -> bool:
    """True for an array of floats, or for the type of one in a model that is not made yet."""
    return eqx.is_inexact_array(leaf) or (
        isinstance(leaf, jax.ShapeDtypeStruct) and jnp.issubdtype(leaf.dtype, jnp.inexact)
    )


def _is_state(node: Any) -> bool:
    return isinstance(node, eqx.nn.StateIndex)
