"""The GPT and the ViT of `models/transformer.py` in the sizes of `shapes`, and a step of their training."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import optax

from models.transformer import GPT, Config, ViT

from . import shapes


# Numbers of an image that a vector is made of: 16 x 16 pixels in three colours.
PATCH = 16 * 16 * 3


def gpt(model: shapes.Model, dtype: Any) -> GPT:
    return _cast(GPT(_config(model), model.vocabulary, key=jax.random.key(0)), dtype)


def vit(model: shapes.Model, dtype: Any) -> ViT:
    return _cast(ViT(_config(model), PATCH, model.vocabulary, key=jax.random.key(0)), dtype)


def _config(model: shapes.Model) -> Config:
    return Config(model.layers, model.embedding, model.hidden, model.heads, model.length)


def _cast(model: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, model)


def step(
    loss: Callable[[Any, Any], jax.Array],
) -> tuple[Callable[[Any], Any], Callable[..., tuple[jax.Array, Any, Any]]]:
    """Two functions: the state of the optimizer for a model's arrays; and one step, of these arrays, the rest of the model, that
    state and a batch, which returns the loss, new arrays and a new state."""
    optimizer = optax.adamw(3e-4)

    def of_arrays(arrays: Any, static: Any, batch: Any) -> jax.Array:
        return loss(eqx.combine(arrays, static), batch)

    def train(arrays: Any, static: Any, state: Any, batch: Any) -> tuple[jax.Array, Any, Any]:
        value, gradients = jax.value_and_grad(of_arrays)(arrays, static, batch)
        updates, state = optimizer.update(gradients, state, arrays)
        return value, eqx.apply_updates(arrays, updates), state

    return optimizer.init, train
