"""The parts that layers are made of, for tests that make them in several dtypes."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .naive import normal


KEY = jax.random.key(0)
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def floats(dtype: Any, *shapes: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(jnp.asarray(normal(i, *shape, dtype=dtype)) for i, shape in enumerate(shapes))


def filled(make: Callable[[], Any], dtype: Any) -> Any:
    """Return what `make` makes, with random arrays: initialising it would compile a program for each of their shapes."""
    rng = np.random.default_rng(0)

    def random(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        values = rng.standard_normal(x.shape) / max(x.shape[-1:], default=1) ** 0.5
        return jnp.asarray(values.astype(dtype))

    return jax.tree.map(random, eqx.filter_eval_shape(make))


def apart(layer: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Its arrays, and what makes it of them."""
    leaves, tree = jax.tree.flatten(layer)
    where = [i for i, leaf in enumerate(leaves) if eqx.is_array(leaf)]

    def whole(arrays: list[Any]) -> Any:
        values = dict(zip(where, arrays, strict=True))
        return jax.tree.unflatten(tree, [values.get(i, leaf) for i, leaf in enumerate(leaves)])

    return [leaves[i] for i in where], whole


def widened(x: Any) -> Any:
    """Return the arrays that a user calls f32, from 16 bits."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x, x)
