"""Caches of several texts, which one program reads and fills: the weights are read once for all of them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Int

from ..captured import compile_captured
from ..llama import Cache
from ..parallel import tensor_parallel
from .chooser import Choice, choose_each, operands_of
from .reader import Model
from .sampling import Sampling, Steps


class Rows:
    """One cache for each text, side by side.

    **Arguments:**

    - `model`: a `Llama`, a `SplitLlama` or a `SequenceLlama`.
    - `shapes`: of the blocks of one cache, as of a `models.decoding.reader.Reader`.

    **Attributes:**

    - `width`: how many caches there are. A program is compiled for each width.
    """

    def __init__(self, model: Model, shapes: Any):
        self.width = 0
        self._shapes = shapes
        self._blocks: Any = None
        # Flat, and so faster to pass than a tree of Modules.
        self._weights, self._tree = jax.tree.flatten(model)
        self._programs: dict[int, tuple[Any, Any]] = {}
        self._vocab_size = model.config.vocab_size
        self._logits = model.logits_sharding
        self._unseen: dict[int, jax.Array] = {}

    def resize(self, width: int, kept: Sequence[int] = ()) -> None:
        """Have another number of caches. The first of them are those that had the indices `kept`."""
        if kept:
            indices = np.resize(np.asarray(kept, np.int32), width)  # the rest has anything
            leaves, tree = jax.tree.flatten(self._blocks)
            self._blocks = None
            for i, leaf in enumerate(leaves):  # one at a time: two of all would need the memory twice
                leaves[i] = _taken(leaf, indices)
            self._blocks = jax.tree.unflatten(tree, leaves)
        elif width != self.width:
            self._blocks = None
            self._blocks = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), self._many(width))
        self.width = width

    def put(self, i: int, blocks: Any) -> None:
        """Copy a cache."""
        put, _ = self.programs(self.width)
        self._blocks = put(self._blocks, blocks, np.int32(i))

    def step(
        self,
        tokens: Int[np.ndarray, " width"],
        lengths: Int[np.ndarray, " width"],
        choices: Sequence[Choice | None],
    ) -> Int[np.ndarray, " width"]:
        """Put a token into each cache, and choose the next one, by one program whatever the choices are.

        **Arguments:**

        - `lengths`: how many tokens the caches have.
        - `choices`: of the texts, which get their tokens; `None` for a cache that nobody needs.

        **Returns:** the next tokens.
        """
        _, step = self.programs(self.width)
        operands = operands_of(choices, self._unseen[self.width])
        chosen, self._blocks = step(self._weights, tokens[:, None], lengths, self._blocks, *operands)
        tokens = np.asarray(chosen)
        for choice, token in zip(choices, tokens, strict=True):
            if choice is not None:
                choice.add(int(token))
        return tokens

    def programs(self, width: int) -> tuple[Any, Any]:
        """Return what `put` and `step` run with this width, compiled if need be."""
        if width not in self._programs:
            many = self._many(width)
            index, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((), (width,)))
            tokens = jax.ShapeDtypeStruct((width, 1), jnp.int32)
            put = jax.jit(_put, donate_argnums=0).lower(many, self._shapes, index)
            unseen = np.zeros((width, self._vocab_size), bool)
            self._unseen[width] = (
                jax.device_put(unseen) if self._logits is None else tensor_parallel.put(unseen, self._logits)
            )
            operands = operands_of([None] * width, self._unseen[width])
            step = compile_captured(self._step, self._weights, tokens, lengths, many, *operands, donate_argnums=3)
            self._programs[width] = put.compile(), step
        return self._programs[width]

    def _step(
        self,
        weights: Any,
        tokens: jax.Array,
        lengths: jax.Array,
        blocks: Any,
        seeds: Any,
        sampling: Sampling,
        seen: Any,
        steps: Steps,
    ) -> Any:
        model = jax.tree.unflatten(self._tree, weights)

        def one(tokens: jax.Array, length: jax.Array, blocks: Any) -> Any:
            x, cache = model(tokens, Cache(blocks, length))
            return model.logits(x)[0], cache.blocks

        logits, blocks = jax.vmap(one)(tokens, lengths, blocks)
        chosen = choose_each(logits, lengths + 1, seeds, sampling, seen, steps)
        if self._logits is not None:
            chosen = jax.lax.with_sharding_constraint(chosen, NamedSharding(self._logits.mesh, PartitionSpec()))
        return chosen, blocks

    def _many(self, width: int) -> Any:
        """The shapes of so many caches."""

        def many(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            sharding = x.sharding
            if isinstance(sharding, NamedSharding):
                sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
            return jax.ShapeDtypeStruct((width, *x.shape), x.dtype, sharding=sharding)

        return jax.tree.map(many, self._shapes)


def _put(blocks: Any, row: Any, i: jax.Array) -> Any:
    return jax.tree.map(lambda many, one: jax.lax.dynamic_update_index_in_dim(many, one, i, 0), blocks, row)


@jax.jit
def _taken(x: jax.Array, indices: jax.Array) -> jax.Array:
    """`x[indices]`, by copies: as a gather it takes five times as long."""
    rows = [jax.lax.dynamic_index_in_dim(x, indices[i], 0, keepdims=False) for i in range(len(indices))]
    return jnp.stack(rows)
