"""Count the parameters of a model."""

import equinox as eqx
import jax
import jax.numpy as jnp

from ..core import PyTree


def of_model(model: PyTree) -> int:
    """An array that is in several places counts once."""
    arrays = filter(is_parameter, jax.tree.leaves(model, is_leaf=_is_state))
    return sum({id(array): array.size for array in arrays}.values())


def of_module(module: eqx.Module) -> int:
    """Count the parameters of a Module without those of the Modules in it."""
    if _is_state(module):
        return 0
    leaves = jax.tree.leaves(module, is_leaf=lambda node: node is not module and isinstance(node, eqx.Module))
    return of_model([leaf for leaf in leaves if not isinstance(leaf, eqx.Module)])


def is_parameter(leaf: object) -> bool:
    """True for an array of floats, or for the type of one in a model that is not made yet."""
    return eqx.is_inexact_array(leaf) or (
        isinstance(leaf, jax.ShapeDtypeStruct) and jnp.issubdtype(leaf.dtype, jnp.inexact)
    )


def _is_state(node: object) -> bool:
    return isinstance(node, eqx.nn.StateIndex)
