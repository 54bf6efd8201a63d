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
    - `logits`: by which `step` has chosen its tokens; `None` of a model on several devices, none of which has them whole.
    """

    def __init__(self, model: Model, shapes: Any):
        self.width = 0
        self.logits: jax.Array | None = None
        self._shapes = shapes
        self._blocks: Any = None
        # Flat, and so faster to pass than a tree of Modules.
        self._weights, self._tree = jax.tree.flatten(model)
        self._programs: dict[int, tuple[Any, Any]] = {}
        self._empty_programs: dict[int, Any] = {}
        self._move_programs: dict[tuple[Any, int], Any] = {}
        self._vocab_size = model.config.vocab_size
        self._logits = model.logits_sharding
        self._blank: dict[int, tuple[jax.Array, jax.Array]] = {}  # for texts without a penalty, and without a bias

    def resize(self, width: int, kept: Sequence[int] = ()) -> None:
        """Have another number of caches. The first of them are those that had the indices `kept`."""
        if kept:
            indices = np.resize(np.asarray(kept, np.int32), width)  # the rest has anything
            moves = self.moves(self.width, width)
            leaves, tree = jax.tree.flatten(self._blocks)
            self._blocks = None
            for i, move in enumerate(moves):  # one at a time: two of all would need the memory twice
                leaves[i] = move(leaves[i], indices)
            self._blocks = jax.tree.unflatten(tree, leaves)
        elif width != self.width:
            self._blocks = None
            self._blocks = self.empty(width)()
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
        operands = operands_of(choices, *self._blank[self.width])
        self.logits = None
        chosen, self.logits, self._blocks = step(self._weights, tokens[:, None], lengths, self._blocks, *operands)
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
            unseen, unbiased = (
                self._on_device(np.zeros((width, self._vocab_size), dtype)) for dtype in (bool, np.float32)
            )
            self._blank[width] = unseen, unbiased
            operands = operands_of([None] * width, unseen, unbiased)
            step = compile_captured(self._step, self._weights, tokens, lengths, many, *operands, donate_argnums=3)
            self._programs[width] = put.compile(), step
        return self._programs[width]

    def empty(self, width: int) -> Any:
        """Return the program that makes so many caches, compiled if need be."""
        if width not in self._empty_programs:
            many = self._many(width)
            zeros = jax.jit(
                lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), many),
                out_shardings=jax.tree.map(lambda x: x.sharding, many),
            )
            self._empty_programs[width] = zeros.lower().compile()
        return self._empty_programs[width]

    def moves(self, old: int, new: int) -> list[Any]:
        """Return what `resize` runs to move caches, a program for each of their arrays, compiled if need be."""
        indices = jax.ShapeDtypeStruct((new,), jnp.int32)
        leaves = jax.tree.leaves(self._many(old))
        for leaf in leaves:
            if (leaf, new) not in self._move_programs:
                move = jax.jit(_taken, out_shardings=leaf.sharding).lower(leaf, indices)
                self._move_programs[leaf, new] = move.compile()
        return [self._move_programs[leaf, new] for leaf in leaves]

    def _step(
        self,
        weights: Any,
        tokens: jax.Array,
        lengths: jax.Array,
        blocks: Any,
        seeds: Any,
        sampling: Sampling,
        seen: Any,
        bias: Any,
        steps: Steps,
    ) -> Any:
        model = jax.tree.unflatten(self._tree, weights)

        def one(tokens: jax.Array, length: jax.Array, blocks: Any) -> Any:
            x, cache = model(tokens, Cache(blocks, length))
            return model.logits(x)[0], cache.blocks

        logits, blocks = jax.vmap(one)(tokens, lengths, blocks)
        chosen = choose_each(logits, lengths + 1, seeds, sampling, seen, bias, steps)
        if self._logits is None:
            return chosen, logits, blocks
        chosen = jax.lax.with_sharding_constraint(chosen, NamedSharding(self._logits.mesh, PartitionSpec()))
        return chosen, None, blocks

    def _on_device(self, values: np.ndarray) -> jax.Array:
        return jax.device_put(values) if self._logits is None else tensor_parallel.put(values, self._logits)

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


def _taken(x: jax.Array, indices: jax.Array) -> jax.Array:
    """`x[indices]`, by copies: as a gather it takes five times as long."""
    rows = [jax.lax.dynamic_index_in_dim(x, indices[i], 0, keepdims=False) for i in range(len(indices))]
    return jnp.stack(rows)
