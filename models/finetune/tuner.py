"""Fine-tunes the adapters of a Llama, whose weights stay as they are.

The blocks are stacked, and a loop goes over them, forward and backward: what a derivative needs of one block, such as its
quantised weights in f32, is in memory for one block at a time. In a program without the loop XLA expands those of all blocks.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from .. import snapshots
from ..llama import Block, Llama
from ..lora import Adapters, adapted
from .examples import Batch
from .token_losses import token_losses


# Gradients longer than this are shortened: the first steps of Adam would be led by few examples else.
_LONGEST_GRADIENT = 1.0

# For each stack of blocks, their adapters, stacked.
Stacked = list[Any]


class Tuner:
    """A model and adapters for it.

    **Arguments:**

    - `model`: without adapters.
    - `adapters`: to begin with.
    - `learning_rate`: of Adam in the first step, after which it falls to 0 linearly.
    - `steps`: how many there will be.
    """

    def __init__(self, model: Llama, adapters: Adapters, *, learning_rate: float, steps: int):
        self._model = eqx.tree_at(lambda model: model.blocks, model, [])
        self._runs = _runs(model.blocks)
        self._blocks = [stacked(model.blocks[run]) for run in self._runs]
        self._adapters: Stacked = [stacked(adapters.blocks[run]) for run in self._runs]
        schedule = optax.linear_schedule(learning_rate, 0.0, steps)
        self._optimizer = optax.chain(optax.clip_by_global_norm(_LONGEST_GRADIENT), optax.adam(schedule))
        self._state = self._optimizer.init(self._adapters)
        self._programs: dict[Any, Any] = {}

    @property
    def adapters(self) -> Adapters:
        """The adapters as they are by now."""
        blocks = []
        for run, of_run in zip(self._runs, self._adapters, strict=True):
            for index in range(run.stop - run.start):
                blocks.append(jax.tree.map(lambda array, index=index: array[index], of_run))
        return Adapters(blocks)

    @property
    def state(self) -> tuple[Stacked, Any]:
        """All that steps change: the adapters, stacked, and the optimizer's state."""
        return self._adapters, self._state

    @state.setter
    def state(self, state: tuple[Stacked, Any]) -> None:
        self._adapters, self._state = state

    def checksum(self) -> int:
        """Return the CRC-32 of the model's weights."""
        return snapshots.checksum((self._blocks, self._model))

    def step(self, batch: Batch) -> float:
        """Take one step, and return the mean loss before it: NaN as well if the gradients have no finite norm."""
        arguments = self._adapters, self._state, self._blocks, self._model, batch
        self._adapters, self._state, loss = self.program(batch)(*arguments)
        return float(loss)

    def program(self, batch: Batch) -> Any:
        """Compile what `step` runs for a batch of this shape, if that is not done."""
        arguments = self._adapters, self._state, self._blocks, self._model, batch
        return self._compiled(self._step, arguments, donate=(0, 1))

    def perplexity(
        self, batches: Sequence[Batch], progress: Callable[[Iterable[Batch]], Iterable[Batch]] = iter
    ) -> float:
        """The exponential of the mean loss, over all targets that count: infinity if it is more than a float holds."""
        losses, count = 0.0, 0
        for batch in progress(batches):
            arguments = self._adapters, self._blocks, self._model, batch
            losses += float(self._compiled(total_loss, arguments)(*arguments))
            count += int((batch.targets >= 0).sum())
        mean = losses / count
        return math.inf if mean > 700 else math.exp(mean)  # NaN stays NaN

    def _step(self, adapters: Stacked, state: Any, blocks: list[Block], model: Llama, batch: Batch) -> Any:
        def mean_loss(adapters: Stacked) -> Float[Array, ""]:
            return total_loss(adapters, blocks, model, batch) / (batch.targets >= 0).sum().astype(jnp.float32)

        loss, gradients = jax.value_and_grad(mean_loss)(adapters)
        with jax.numpy_dtype_promotion("standard"):  # optax promotes
            # The optimizer has the same norm: XLA computes it once.
            loss = jnp.where(jnp.isfinite(optax.tree.norm(gradients)), loss, jnp.nan)
            updates, state = self._optimizer.update(gradients, state, adapters)
        return optax.apply_updates(adapters, updates), state, loss

    def _compiled(self, function: Callable[..., Any], arguments: Any, donate: tuple[int, ...] = ()) -> Any:
        key = function.__name__, arguments[-1].tokens.shape
        if key not in self._programs:
            self._programs[key] = jax.jit(function, donate_argnums=donate).lower(*arguments).compile()
        return self._programs[key]


def total_loss(adapters: Stacked, blocks: list[Block], model: Llama, batch: Batch) -> Float[Array, ""]:
    """The sum of the losses of a batch.

    **Arguments:**

    - `adapters`, `blocks`: `stacked`, in as many stacks as there are kinds of blocks.
    - `model`: without blocks.
    """
    embed = jax.vmap(functools.partial(_hidden, adapters, blocks, model))
    x = embed(jnp.asarray(batch.tokens))
    output = model.embedding.table if model.output is None else model.output.layers[0]
    return token_losses(x.reshape(-1, x.shape[-1]), output, jnp.asarray(batch.targets).reshape(-1)).sum()


def _hidden(adapters: Stacked, blocks: list[Block], model: Llama, tokens: Int[Array, " S"]) -> Float[Array, "S E"]:
    """The hidden states that the layer of the logits takes."""
    table = model.rotary_table(jnp.arange(len(tokens), dtype=jnp.int32))

    @jax.checkpoint  # what it keeps of a block is its input, one array: the sum is what the block's norm begins with
    def step(x: Array, block_and_adapters: Any) -> tuple[Array, None]:
        block, adapters = block_and_adapters
        x, residual, _ = adapted(block, adapters)(x, jnp.zeros_like(x), table)
        return x + residual, None

    x = model.embedding(tokens).astype(model.dtype)
    for run in zip(blocks, adapters, strict=True):
        x, _ = jax.lax.scan(step, x, run)
    return jax.vmap(model.norm)(x)


def _runs(blocks: Sequence[Block]) -> list[slice]:
    """Neighbours of one kind: a file may have the weights of some blocks in another encoding."""
    kinds = [(jax.tree.structure(block), [leaf.shape for leaf in jax.tree.leaves(block)]) for block in blocks]
    ends = list(itertools.accumulate(len(list(group)) for _, group in itertools.groupby(kinds)))
    return [slice(*ends_of_run) for ends_of_run in itertools.pairwise([0, *ends])]


def stacked(trees: Sequence[Any]) -> Any:
    """One tree whose arrays have one more axis, in front, for trees of one structure."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
