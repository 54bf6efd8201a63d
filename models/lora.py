"""Low-rank adapters (LoRA) of a Llama's linear layers, whose own weights stay as they are, quantised or not.

To each weight `W` that is tuned, `scale * B A` is added, of rank `R`, by adding `scale * B (A x)` to `W x`.
Paper: https://arxiv.org/abs/2106.09685
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

import eqxcallback as eqxc

from .gguf import Config
from .llama import FEW_TOKENS, Block, Llama, Projection


TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a block, by the names that Hugging Face's transformers and PEFT have for them."""


class LowRank(eqx.Module):
    """`B A`, the update of one weight."""

    a: Float[Array, "*layers R in_features"]
    b: Float[Array, "*layers out_features R"]

    def __call__(self, x: Float[Array, "S in_features"], scale: float) -> Float[Array, "S out_features"]:
        # XLA rounds products of several rows otherwise than those of one, and few tokens should get what each gets alone. So
        # `scale` is between the products as well: behind them it may become one operation with the sum that follows.
        parts = jnp.split(x, len(x)) if len(x) <= FEW_TOKENS else [x]
        a, b = self.a.astype(x.dtype), self.b.astype(x.dtype)
        return jnp.concatenate([((part @ a.T) * scale) @ b.T for part in parts])

    def weight(self) -> Float[Array, "out_features in_features"]:
        return jnp.matmul(self.b, self.a, precision=jax.lax.Precision.HIGHEST)


class Adapter(eqx.Module):
    """The updates of a `models.llama.Projection`, whose layers lie side by side.

    **Attributes:**

    - `updates`: by the names of `TARGETS`. A layer without one stays as it is.
    - `sizes`: for each layer, its name and `out_features`.
    - `scale`: what updates are multiplied with.
    """

    updates: dict[str, LowRank]
    sizes: tuple[tuple[str, int], ...] = eqx.field(static=True)
    scale: float = eqx.field(static=True)

    def __call__(self, x: Float[Array, "S in_features"]) -> Float[Array, "S out_features"]:
        outs = [
            self.updates[name](x, self.scale) if name in self.updates else jnp.zeros((len(x), size), x.dtype)
            for name, size in self.sizes
        ]
        return jnp.concatenate(outs, axis=-1)

    def weight(self, in_features: int) -> Float[Array, "out_features in_features"]:
        """The matrix that this adds to the weights."""
        rows = [
            self.updates[name].weight() * self.scale if name in self.updates else jnp.zeros((size, in_features))
            for name, size in self.sizes
        ]
        return jnp.concatenate(rows)


class Adapters(eqx.Module):
    """The adapters of a model: for each block, those of its projections by their names in `models.llama.Block`."""

    blocks: list[dict[str, Adapter]]


def init(config: Config, *, rank: int, scale: float, targets: Sequence[str] = TARGETS, key: PRNGKeyArray) -> Adapters:
    """New adapters, which change nothing yet: `A` is random and `B` is zero.

    **Arguments:**

    - `config`: of the model.
    - `rank`: `R`.
    - `scale`: what updates are multiplied with; `alpha / R` in the paper.
    - `targets`: the layers that are tuned, of `TARGETS`.
    - `key`: of the numbers in `A`, which are as PEFT draws them.

    **Raises:** `ValueError` if `rank` is less than 1, if there are no targets, or if one is not of `TARGETS`.
    """
    if rank < 1:
        raise ValueError(f"lora.init: expected a rank of 1 or more; got {rank}.")
    if not targets or not set(targets) <= set(TARGETS):
        raise ValueError(f"lora.init: expected targets of {', '.join(TARGETS)}; got {targets!r}.")
    blocks: list[dict[str, Adapter]] = []
    for of_block in jax.random.split(key, config.num_layers):
        keys: dict[str, PRNGKeyArray] = dict(zip(TARGETS, jax.random.split(of_block, len(TARGETS)), strict=True))
        adapters = {}
        for projection, (in_features, sizes) in _sizes(config).items():
            limit = in_features**-0.5
            updates = {
                name: LowRank(
                    jax.random.uniform(keys[name], (rank, in_features), minval=-limit, maxval=limit),
                    jnp.zeros((out_features, rank)),
                )
                for name, out_features in sizes.items()
                if name in targets
            }
            if updates:
                adapters[projection] = Adapter(updates, tuple(sizes.items()), scale)
        blocks.append(adapters)
    return Adapters(blocks)


def _sizes(config: Config) -> dict[str, tuple[int, dict[str, int]]]:
    """For each projection of a block its `in_features`, and the `out_features` of its layers."""
    embedding, hidden = config.embedding_size, config.hidden_size
    heads, kv_heads = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    return {
        "qkv": (embedding, {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}),
        "attention_out": (heads, {"o_proj": embedding}),
        "gate_up": (embedding, {"gate_proj": hidden, "up_proj": hidden}),
        "down": (hidden, {"down_proj": embedding}),
    }


def adapted(block: Block, adapters: dict[str, Adapter]) -> Block:
    """A block with adapters, in place of those that it has."""

    def where(block: Block) -> list[Any]:
        return [getattr(block, name).adapter for name in adapters]

    return eqx.tree_at(where, block, list(adapters.values()), is_leaf=lambda leaf: leaf is None)


def attach(model: Llama, adapters: Adapters) -> Llama:
    """The model with adapters. Its weights are the very same arrays."""
    blocks = [adapted(*pair) for pair in zip(model.blocks, adapters.blocks, strict=True)]
    return eqx.tree_at(lambda model: model.blocks, model, blocks)


def merge(
    model: Llama,
    *,
    encoding: eqxc.ops.Encoding | None = None,
    progress: Callable[[Iterable[Projection]], Iterable[Projection]] = iter,
) -> Llama:
    """The model with its adapters inside its weights, so that they take no time of their own.

    **Arguments:**

    - `model`: with adapters.
    - `encoding`: of the new weights; see [`eqxcallback.ops.quantize`][]. By default they are in the dtype of the activations:
        quantised weights and an update have a sum that no quantised weights have.
    - `progress`: wraps the iteration over the model's projections, as `tqdm` does.

    **Returns:** the model. It keeps the weights and adapters that it had, for `unmerge`.
    """

    def merged(projection: Projection) -> Projection:
        if not isinstance(projection.adapter, Adapter):
            return projection
        weight = jnp.concatenate([_weight(layer) for layer in projection.layers])
        weight = (weight + projection.adapter.weight(weight.shape[1])).astype(model.dtype)
        biases = [layer.bias for layer in projection.layers if layer.bias is not None]  # all layers have one, or none
        bias = jnp.concatenate(biases) if biases else None
        new = eqx.filter_eval_shape(
            eqxc.nn.Linear, *weight.shape[::-1], use_bias=bias is not None, key=jax.random.key(0)
        )
        layer = eqx.tree_at(lambda layer: (layer.weight, layer.bias), new, (weight, bias), is_leaf=lambda x: x is None)
        if encoding is not None:
            layer = eqxc.nn.QuantizedLinear.from_linear(layer, encoding=encoding, activations=_activations(projection))
        return Projection([layer], unmerged=projection)

    return _map_projections(merged, model, progress)


def unmerge(model: Llama) -> Llama:
    """The model that `merge` was given: its very arrays."""
    return _map_projections(lambda projection: projection.unmerged or projection, model)


def detach(model: Llama) -> Llama:
    """The model without adapters, merged ones as well: the very arrays that it had before `attach`."""
    return _map_projections(lambda projection: Projection(projection.layers), unmerge(model))


def _weight(layer: eqxc.nn.QuantizedLinear | eqxc.nn.Linear) -> Float[Array, "out_features in_features"]:
    if isinstance(layer, eqxc.nn.Linear):
        return layer.weight.astype(jnp.float32)
    return layer.rows(jnp.arange(layer.out_features))


def _activations(projection: Projection) -> eqxc.ops.Activations:
    """Return those of its quantised layers, which are all the same."""
    for layer in projection.layers:
        if isinstance(layer, eqxc.nn.QuantizedLinear):
            return layer.activations
    return "exact"


def _map_projections(function: Any, model: Llama, progress: Any = iter) -> Llama:
    def where(model: Llama) -> list[Projection]:
        return list(_projections(model))

    return eqx.tree_at(where, model, [function(projection) for projection in progress(where(model))])


def _projections(model: Llama) -> Iterator[Projection]:
    for block in model.blocks:
        yield from (block.qkv, block.attention_out, block.gate_up, block.down)
