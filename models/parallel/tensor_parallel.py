"""A `Llama` split over devices: each has some of the heads, of the hidden features, and of the words, and their cache.

Weights are split along their rows, except those of the two layers that end a block's branches: they are split along their
columns, and the devices' results are added up. So a device reads its part of the weights and of the cache, and the devices
exchange one vector of the embedding's size for each token and branch.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

import eqxcallback as eqxc

from .._errors import ModelFileError
from .._files import Files
from ..gguf import Config
from ..llama import Block, Cache, Embedding, HeadNorm, Llama, Projection, load as load_whole
from ..lora import Adapter, Adapters, LowRank, adapted


AXIS = "devices"


class SplitLlama(eqx.Module):
    """A `Llama` over the devices of a mesh, which is called as a `Llama` is. `load` makes one.

    **Attributes:**

    - `part`: what each device runs. Its sizes are those of one device; its arrays are split over all.
    - `config`: the sizes of the whole model.
    - `mesh`: of the devices, with the one axis `AXIS`.
    """

    part: Llama
    config: Config = eqx.field(static=True)
    mesh: jax.sharding.Mesh = eqx.field(static=True)

    @property
    def logits_sharding(self) -> NamedSharding:
        """Return that of `logits`, which stay split along the vocabulary."""
        return NamedSharding(self.mesh, PartitionSpec(None, AXIS))

    def init_cache(self, max_length: int) -> Cache:
        shapes = jax.eval_shape(lambda: self.part.init_cache(max_length))
        return self._map(lambda: self.part.init_cache(max_length), (), _specs(shapes))

    def __call__(
        self, tokens: Int[Array, " S"], cache: Cache, valid: Int[Array, ""] | int | None = None
    ) -> tuple[Float[Array, "S E"], Cache]:
        count = jnp.asarray(len(tokens) if valid is None else valid, jnp.int32)
        arguments, whole = (self.part, tokens, cache, count), PartitionSpec()
        return self._map(lambda part, *rest: part(*rest), arguments, (whole, _specs(cache)))

    def logits(self, x: Float[Array, "S E"]) -> Float[Array, "S V"]:
        return self._map(lambda part, x: part.logits(x), (self.part, x), PartitionSpec(None, AXIS))

    def on_devices(self, function: Callable[..., Array], *arguments: Any) -> Array:
        """Call a function on each device with its part of the arguments, as layers and their inputs are split.

        **Returns:** the results of the devices, one after the other along the first axis.
        """
        return self._map(function, arguments, PartitionSpec(AXIS))

    def _map(self, function: Callable[..., Any], arguments: tuple[Any, ...], out_specs: Any) -> Any:
        specs = tuple(_specs(argument) for argument in arguments)
        return jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=out_specs)(*arguments)


def mesh_of(devices: Sequence[Any]) -> jax.sharding.Mesh:
    """Return a mesh of these devices of JAX, with the one axis `AXIS`."""
    return jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def put(x: Any, sharding: NamedSharding) -> Array:
    """Put an array, or PRNG keys, onto devices, which may be of several processes, each of which has it whole."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(put(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
    values = np.asarray(x)  # not `jax.device_put`, by which the processes would compare all values
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def load(
    file: Files,
    mesh: jax.sharding.Mesh,
    *,
    dtype: Any = jnp.float32,
    cache_dtype: Any = None,
    activations: eqxc.ops.Activations = "exact",
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
    adapters: Adapters | None = None,
) -> SplitLlama:
    """The model of a file, split over devices part by part: no device ever has more than one of its parts whole.

    **Arguments:**

    - `mesh`: of `mesh_of`. Its devices may be of several processes, each of which makes this call.
    - `dtype`, `cache_dtype`, `activations`, `progress`: as for `models.llama.load`.
    - `adapters`: of the whole model, which are split as its weights are.

    **Raises:** `ModelFileError` if the model cannot be split evenly over so many devices, and as `models.llama.load` does.
    """
    count, whole = mesh.size, file.config
    check_divides(file, count)
    of_blocks = iter([] if adapters is None else adapters.blocks)

    def place(part: Any) -> Any:
        part = adapted(part, next(of_blocks, {})) if isinstance(part, Block) else part
        return _put(_split(part, whole, count), mesh)

    options: dict[str, Any] = {"dtype": dtype, "cache_dtype": cache_dtype, "activations": activations}
    model = load_whole(file, **options, progress=progress, place=place)
    sizes = ("num_heads", "num_kv_heads", "hidden_size", "vocab_size")
    config = dataclasses.replace(whole, **{name: getattr(whole, name) // count for name in sizes})
    return SplitLlama(dataclasses.replace(model, config=config), whole, mesh)


def check_divides(file: Files, count: int) -> None:
    """Raise `ModelFileError` if a model cannot be split evenly over `count` devices."""
    fitting = [n for n in range(1, file.config.num_kv_heads + 1) if not _obstacles(file, n)]
    if count not in fitting:
        numbers = " or ".join(map(str, fitting))
        raise ModelFileError(
            f"expected a number of devices that divides {', '.join(_obstacles(file, count))}; got {count}. Use {numbers}."
        )


def bytes_per_device(tree: Any) -> int:
    """Return how many bytes of a tree's arrays the first device of this process has."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def _obstacles(file: Files, count: int) -> list[str]:
    """Return the sizes that `count` does not divide, in words."""
    config = file.config
    sizes = {
        "key/value heads": config.num_kv_heads,
        "hidden features": config.hidden_size,
        "words": config.vocab_size,
    }
    # Columns of these are split, which for quantised weights are blocks.
    for name, features, what in (
        ("attn_output", config.num_heads * config.head_size, "blocks of attention features"),
        ("ffn_down", config.hidden_size, "blocks of hidden features"),
    ):
        encodings = {file.tensors[f"blk.{index}.{name}.weight"].encoding for index in range(config.num_layers)}
        quantised = encodings.intersection(eqxc.ops.ENCODINGS)
        if quantised:
            sizes[what] = features // max(GGML_QUANT_SIZES[GGMLQuantizationType[encoding]][0] for encoding in quantised)
    return [f"{size} {what}" for what, size in sizes.items() if size % count]


def _split(part: Any, config: Config, count: int) -> Any:
    """A part of a model as `count` devices run it, with the rows of each side by side. `config` is the whole model's."""
    if isinstance(part, Embedding):
        return dataclasses.replace(part, sum_over=AXIS)
    if not isinstance(part, Block):
        return part
    heads, kv_heads = (number * config.head_size for number in (config.num_heads, config.num_kv_heads))
    return dataclasses.replace(
        part,
        qkv=_regrouped(part.qkv, [heads, kv_heads, kv_heads], count),
        attention_out=_summed(part.attention_out),
        gate_up=_regrouped(part.gate_up, [config.hidden_size] * 2, count),
        down=_summed(part.down),
        num_heads=config.num_heads // count,
        num_kv_heads=config.num_kv_heads // count,
        head_norm=_regrouped_rows(part.head_norm, [config.num_heads, config.num_kv_heads], count),
    )


def _summed(projection: Projection) -> Projection:
    if any(layer.bias is not None for layer in projection.layers):
        raise ModelFileError("expected no bias where devices add up their results; got one. Use one device.")
    return dataclasses.replace(projection, sum_over=AXIS)


def _regrouped(projection: Projection, sizes: Sequence[int], count: int) -> Projection:
    """A projection with the rows in another order: of each of its parts, which have these sizes, a device has some."""
    layers, remaining = [], list(sizes)
    for layer in projection.layers:
        parts = [remaining.pop(0)]
        while sum(parts) < int(layer.out_features):
            parts.append(remaining.pop(0))
        layers.append(_regrouped_rows(layer, parts, count))
    adapter = projection.adapter
    if isinstance(adapter, Adapter):  # the rows of each of its updates are of one part, and in order as they are
        of_device = tuple((name, size // count) for name, size in adapter.sizes)
        adapter = dataclasses.replace(adapter, sizes=of_device)
    return dataclasses.replace(projection, layers=layers, adapter=adapter)


def _regrouped_rows(tree: Any, sizes: Sequence[int], count: int) -> Any:
    """Arrays with the rows in another order: of each of the parts, which have these sizes, a device has some."""

    def regroup(x: Array) -> np.ndarray:
        of_devices = [part.reshape(count, -1, *x.shape[1:]) for part in np.split(np.asarray(x), np.cumsum(sizes)[:-1])]
        return np.concatenate(of_devices, axis=1).reshape(x.shape)

    return jax.tree.map(regroup, tree)


def _put(part: Any, mesh: jax.sharding.Mesh) -> Any:
    return jax.tree.map(lambda x, spec: put(x, NamedSharding(mesh, spec)), part, _specs(part))


def _specs(tree: Any) -> Any:
    """A tree like this one, of how its arrays are split."""

    whole, split_rows, split_columns = PartitionSpec(), PartitionSpec(AXIS), PartitionSpec(None, AXIS)

    def rows(x: Any) -> Any:
        return dataclasses.replace(x, a=whole, b=split_rows) if isinstance(x, LowRank) else split_rows

    def columns(x: Any) -> Any:
        if isinstance(x, LowRank):
            return dataclasses.replace(x, a=split_columns, b=whole)
        return split_columns if x.ndim == 2 else whole

    def specs(node: Any) -> Any:
        if isinstance(node, eqxc.nn.KVCache):
            return jax.tree.map(lambda x: split_columns, node)
        if isinstance(node, Projection):
            is_update = lambda x: isinstance(x, LowRank)
            return jax.tree.map(columns if node.sum_over is not None else rows, node, is_leaf=is_update)
        if isinstance(node, Embedding | HeadNorm):
            return jax.tree.map(rows, node)
        return whole

    return jax.tree.map(
        specs, tree, is_leaf=lambda node: isinstance(node, eqxc.nn.KVCache | Embedding | HeadNorm | Projection)
    )
