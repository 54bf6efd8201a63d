"""Prompts that several devices read at once: each has the weights, and a part of the prompt with its keys and values."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from .._rounding import round_up
from ..llama import Cache, Llama
from .data_parallel import replicate
from .ring_attention import ring_attention
from .tensor_parallel import AXIS, put


# A program is compiled for each number of tokens of a device, which is a multiple of this one.
_STEP = 32


class LongPromptReader:
    """A model that reads each prompt into a cache of its own, over several devices.

    **Arguments:**

    - `model`: a `Llama`, which is copied to each device.
    - `mesh`: of `models.parallel.tensor_parallel.mesh_of`.
    """

    def __init__(self, model: Llama, mesh: jax.sharding.Mesh):
        self._mesh = mesh
        self._model = replicate(model, mesh)
        specs = PartitionSpec(), PartitionSpec(AXIS), PartitionSpec()
        out_specs = PartitionSpec(), PartitionSpec(AXIS)
        self._program = jax.jit(jax.shard_map(_read, mesh=mesh, in_specs=specs, out_specs=out_specs))

    def read(self, tokens: Sequence[int]) -> tuple[Float[Array, "1 V"], list[tuple[Array, Array]]]:
        """**Arguments:**

        - `tokens`: of a whole prompt, at least one.

        **Returns:** the logits after the last token, and the keys and values of each block, which are split along the prompt, in
        order. Padding follows the last token.
        """
        return self._program(self._model, *self._operands(tokens))

    def lower(self, tokens: Sequence[int]) -> jax.stages.Lowered:
        """Return the program of `read`, lowered."""
        return self._program.lower(self._model, *self._operands(tokens))

    def _operands(self, tokens: Sequence[int]) -> tuple[Array, np.ndarray]:
        if not tokens:
            raise ValueError("expected a prompt of at least one token; got none")
        padded = np.zeros(round_up(len(tokens), _STEP * self._mesh.size), np.int32)
        padded[: len(tokens)] = tokens
        return put(padded, NamedSharding(self._mesh, PartitionSpec(AXIS))), np.asarray(len(tokens), np.int32)


def cache_of(model: Llama, length: int, blocks: Sequence[tuple[Array, Array]], max_length: int) -> Cache:
    """Return a cache on one device, for `model` to go on after a prompt.

    **Arguments:**

    - `model`: a `Llama` on one device.
    - `length`: of the prompt.
    - `blocks`: its keys and values, of `LongPromptReader.read`.
    - `max_length`: of the cache, `length` or more.
    """
    if max_length < length:
        raise ValueError(f"cache_of: expected max_length of {length} or more, for the prompt; got {max_length}.")
    cache = model.init_cache(max_length)
    (device,) = cache.length.devices()
    for index, pair in enumerate(blocks):
        k, v = (
            x.at[:length].set(jax.device_put(new, device)[:length])
            for x, new in zip((cache.blocks[index].k, cache.blocks[index].v), pair, strict=True)
        )
        cache = eqx.tree_at(lambda cache, i=index: (cache.blocks[i].k, cache.blocks[i].v), cache, (k, v))
    return eqx.tree_at(lambda cache: cache.length, cache, jnp.asarray(length, jnp.int32))


class _Slice(eqx.Module):
    """Stands in the place of a `KVCache` in a block: this device's keys and values, which the others see too."""

    k: Array | None
    v: Array | None
    length: Int[Array, ""] | None

    def update(self, q: Array, k: Array, v: Array, *, valid: Array) -> tuple[Array, "_Slice"]:
        del valid  # padding is at the end, where nothing else sees it
        return ring_attention(q, k, v, AXIS), _Slice(k, v, self.length)


def _read(model: Llama, tokens: Array, count: Array) -> tuple[Array, list[tuple[Any, Any]]]:
    """The program of each device. `tokens` are its own, `count` those of the whole prompt."""
    start = jax.lax.axis_index(AXIS) * len(tokens)
    slices: Any = [_Slice(None, None, None)] * model.config.num_layers
    x, cache = model(tokens, Cache(slices, start))
    last = count - 1 - start
    has_last = (last >= 0) & (last < len(tokens))
    row = jax.lax.dynamic_slice_in_dim(x, jnp.clip(last, 0, len(tokens) - 1), 1)
    row = jax.lax.psum(jnp.where(has_last, row, 0), AXIS)
    return model.logits(row), [(block.k, block.v) for block in cache.blocks]
