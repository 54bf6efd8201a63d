"""A `Llama` whose text is split over devices: each has all weights, and the keys and values of some of the tokens.

Device `d` of `n` has the tokens at positions `d`, `d + n`, `d + 2 n` and so on, so that all have as much to do: [striped
attention](https://arxiv.org/abs/2311.09431). Several tokens are read side by side, and keys and values go round. One token alone
passes through all devices, which join what they attend to.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

import eqxcallback as eqxc

from ..gguf import Config
from ..llama import Cache, Llama
from .data_parallel import replicate
from .ring_attention import go_round
from .tensor_parallel import AXIS


class SequenceLlama(eqx.Module):
    """A `Llama` over the devices of a mesh, which is called as a `Llama` is, and returns the row of the last token alone. The
    cache has the dtype of the activations.

    **Arguments:**

    - `model`: a `Llama`, which is copied to each device.
    - `mesh`: of `models.parallel.tensor_parallel.mesh_of`.
    """

    model: Llama
    mesh: jax.sharding.Mesh = eqx.field(static=True)

    def __init__(self, model: Llama, mesh: jax.sharding.Mesh):
        self.model, self.mesh = replicate(dataclasses.replace(model, cache_dtype=None), mesh), mesh

    @property
    def config(self) -> Config:
        return self.model.config

    @property
    def logits_sharding(self) -> NamedSharding:
        """Return that of `logits`, which each device has whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    def init_cache(self, max_length: int) -> Cache:
        entries = -(-max_length // self.mesh.size) + 2  # of a device; two for padding

        def new() -> list[eqxc.nn.KVCache]:
            return self.model.init_cache(entries).blocks

        blocks = jax.shard_map(new, mesh=self.mesh, in_specs=(), out_specs=PartitionSpec(AXIS))()
        return Cache(blocks, jnp.zeros((), jnp.int32))

    def __call__(
        self, tokens: Int[Array, " S"], cache: Cache, valid: Int[Array, ""] | int | None = None
    ) -> tuple[Float[Array, "1 E"], Cache]:
        count = jnp.asarray(len(tokens) if valid is None else valid, jnp.int32)
        whole, split = PartitionSpec(), PartitionSpec(AXIS)
        read = jax.shard_map(
            _read, mesh=self.mesh, in_specs=(whole, whole, split, whole, whole), out_specs=(whole, split)
        )
        x, blocks = read(self.model, tokens, cache.blocks, cache.length, count)
        return x, Cache(blocks, cache.length + count)

    def logits(self, x: Float[Array, "1 E"]) -> Float[Array, "1 V"]:
        whole = PartitionSpec()
        return jax.shard_map(Llama.logits, mesh=self.mesh, in_specs=whole, out_specs=whole)(self.model, x)

    def on_devices(self, function: Callable[..., Array], *arguments: Any) -> Array:
        """Call a function on each device with all of the arguments, but with the device's part of each `KVCache`.

        **Returns:** the results of the devices, one after the other along the first axis.
        """
        whole, split = PartitionSpec(), PartitionSpec(AXIS)

        def spec(node: Any) -> PartitionSpec:
            return split if isinstance(node, eqxc.nn.KVCache) else whole

        specs = jax.tree.map(spec, arguments, is_leaf=lambda node: isinstance(node, eqxc.nn.KVCache))
        return jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=split)(*arguments)


class Stripe(eqx.Module):
    """Stands in the place of a `KVCache` in a block: the entries of this device, and how many of them there were."""

    k: Array
    v: Array
    length: Int[Array, ""] | None

    def update(self, q: Array, k: Array, v: Array, *, valid: Array) -> tuple[Array, "Stripe"]:
        """Attend from the new tokens of this device to all tokens before them, which the devices have."""
        assert self.length is not None
        k, v = (eqxc.ops.cache_append(*pair, self.length) for pair in ((self.k, k), (self.v, v)))
        index, start = jax.lax.axis_index(AXIS), self.length

        def attend(step: int, k: Array, v: Array) -> tuple[Array, Array]:
            is_after = index < step  # the tokens of the other device are each after the one here with the same number
            return _attend(q, k, v, start - is_after.astype(jnp.int32))

        return go_round(attend, k, v, AXIS)[0].astype(q.dtype), Stripe(k, v, start + valid)

    def append_rotary(self, qkv: Array, cos: Array, sin: Array, *, valid: Array) -> tuple[Array, "Stripe"]:
        """Let one device keep the one token, whose `valid` is 1. What the others write, they write over."""
        assert self.length is not None
        q, k, v = eqxc.ops.rotary_append(qkv, cos, sin, self.k, self.v, self.length)
        return q, Stripe(k, v, self.length + valid)

    def attend(self, q: Array) -> Array:
        assert self.length is not None
        out, lse = _attend(q, self.k, self.v, self.length - 1)
        weight = jnp.exp(lse - jax.lax.pmax(lse, AXIS))[..., None]
        both = jax.lax.psum(jnp.concatenate([weight * out, weight], axis=-1), AXIS)
        return (both[..., :-1] / both[..., -1:]).astype(q.dtype)


def _attend(q: Array, k: Array, v: Array, offset: Array) -> tuple[Array, Array]:
    out, lse = eqxc.ops.attention_with_lse(q, k, v, causal=True, offset=offset)
    return out.astype(jnp.float32), lse


def _read(model: Llama, tokens: Array, blocks: Any, start: Array, count: Array) -> tuple[Array, Any]:
    """The program of each device. `count` of `tokens`, which all devices have, come after the `start` tokens before."""
    devices, index = jax.lax.axis_size(AXIS), jax.lax.axis_index(AXIS)
    first = (index - start) % devices  # the first of `tokens` that is this device's
    entry = (start + first) // devices
    mine = jnp.maximum(count - first + devices - 1, 0) // devices
    stripes: Any = [Stripe(block.k, block.v, None) for block in blocks]
    if len(tokens) == 1:
        x, cache = model(tokens, Cache(stripes, entry), mine, start[None])
    else:
        size = max(2, -(-len(tokens) // devices))  # two, as one token alone is another matter
        places = first + devices * jnp.arange(size, dtype=jnp.int32)
        x, cache = model(tokens.at[places].get(mode="clip"), Cache(stripes, entry), mine, start + places)
        has_last = (start + count - 1) % devices == index
        row = jax.lax.dynamic_slice_in_dim(x, jnp.maximum(mine - 1, 0), 1)
        x = jax.lax.psum(jnp.where(has_last, row, 0), AXIS)
    return x, eqx.tree_at(_keys_and_values, blocks, _keys_and_values(cache.blocks))


def _keys_and_values(blocks: Any) -> list[Array]:
    return [x for block in blocks for x in (block.k, block.v)]
