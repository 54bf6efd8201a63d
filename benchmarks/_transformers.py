"""The GPT and the ViT of `models/transformer.py` in the sizes of `shapes`, their attention by `jax.nn`, and their training."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import optax
from jaxtyping import Array, Bool, Float

from models.transformer import GPT, Config, ViT

from . import shapes


# Numbers of an image that a vector is made of: 16 x 16 pixels in three colours.
PATCH = 16 * 16 * 3


def gpt(model: shapes.Model, dtype: Any) -> GPT:
    return _cast(GPT(_config(model), model.vocabulary, key=jax.random.key(0)), dtype)


def vit(model: shapes.Model, dtype: Any) -> ViT:
    return _cast(ViT(_config(model), PATCH, model.vocabulary, key=jax.random.key(0)), dtype)


class JaxNNAttention(eqx.Module):
    """Equinox's layer whose core is `jax.nn.dot_product_attention`, as somebody who knows that function would write it."""

    layer: eqx.nn.MultiheadAttention

    def __call__(
        self,
        query: Float[Array, "length size"],
        key: Float[Array, "length size"],
        value: Float[Array, "length size"],
        *,
        mask: Bool[Array, "length length"] | None,
    ) -> Float[Array, "length size"]:
        """Attend. A mask is causal here, and that function makes it itself."""
        layer = self.layer
        projections = ((layer.query_proj, query), (layer.key_proj, key), (layer.value_proj, value))
        q, k, v = (jax.vmap(project)(x).reshape(len(x), layer.num_heads, -1) for project, x in projections)
        heads = jax.nn.dot_product_attention(q, k, v, is_causal=mask is not None)
        return jax.vmap(layer.output_proj)(heads.reshape(len(query), -1))


def with_jax_nn(model: Any) -> Any:
    """The same model, whose attention has the core of `jax.nn`."""
    layers = [JaxNNAttention(block.attention) for block in model.blocks]
    return eqx.tree_at(lambda model: [block.attention for block in model.blocks], model, layers)


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
