"""The two trainings: a GPT on the text of a run, and a ViT on scikit-learn's digits."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import eqxcallback as eqxc
from eqxcallback import ops

from ..transformer import GPT, Config, ViT, gpt_loss, plain_loss, vit_loss
from .digits_data import CLASSES, PATCH_SIZE, PATCHES, Digits
from .options import RunOptions
from .text_data import Text


FUSED, PLAIN = "fused", "plain"


@dataclasses.dataclass(frozen=True)
class Task:
    """A model and its data.

    **Attributes:**

    - `new`: a function that makes the model, of `equinox.nn`.
    - `data`: the batches of each step, and those that are held out.
    - `losses`: for the fused model and the plain one, functions of a model and a batch.
    - `score`: a function of a loss, a model and a batch: figures for a batch that is held out.
    - `unit`, `units`: of what speed is told in, and how many a step has.
    """

    new: Callable[[], Any]
    data: Text | Digits
    losses: Mapping[str, Callable[[Any, Any], jax.Array]]
    score: Callable[[Callable[[Any, Any], jax.Array], Any, Any], dict[str, jax.Array]]
    unit: str
    units: int

    def model(self, which: str) -> Any:
        """Return a new model, the plain one or the fused one."""
        return eqxc.fuse(self.new()).model if which == FUSED else self.new()

    def evaluate(self, which: str, model: Any) -> dict[str, float]:
        """Return the means over what is held out."""
        scores = [_scored(self.score, self.losses[which], model, batch) for batch in self.data.held_out()]
        return {name: sum(float(score[name]) for score in scores) / len(scores) for name in scores[0]}


@eqx.filter_jit
def _scored(score: Callable[..., Any], loss: Callable[..., Any], model: Any, batch: Any) -> Any:
    return score(loss, model, batch)


def make_task(options: RunOptions, folder: pathlib.Path) -> Task:
    """Return the task of a run. Raises `ModelFileError` if the run's folder lacks what it needs."""
    return _gpt(options, folder) if options.model == "gpt" else _vit(options)


def _gpt(options: RunOptions, folder: pathlib.Path) -> Task:
    assert options.length is not None
    assert options.vocab is not None
    # A mean has its gradients sooner. Devices split the axis of a batch where `vmap` has added it.
    fused = functools.partial(ops.linear_cross_entropy, reduction="mean")
    of_each = jax.vmap(ops.linear_cross_entropy, in_axes=(0, None, 0))
    losses = {FUSED: fused if options.devices == 1 else of_each, PLAIN: plain_loss}
    return Task(
        functools.partial(GPT, _config(options, options.length), options.vocab, key=jax.random.key(options.seed)),
        Text(
            folder,
            length=options.length,
            batch=options.batch,
            seed=options.seed,
            accumulate=options.accumulate,
            vocab_size=options.vocab,
            checksum=options.checksum,
        ),
        {which: functools.partial(gpt_loss, loss) for which, loss in losses.items()},
        lambda loss, model, batch: {"held_out": loss(model, batch)},
        "tokens",
        options.batch * options.accumulate * options.length,
    )


def _vit(options: RunOptions) -> Task:
    config = _config(options, PATCHES + 1)
    losses = {FUSED: ops.softmax_cross_entropy, PLAIN: optax.softmax_cross_entropy_with_integer_labels}
    return Task(
        functools.partial(ViT, config, PATCH_SIZE, CLASSES, key=jax.random.key(options.seed)),
        Digits(batch=options.batch * options.accumulate, seed=options.seed),
        {which: functools.partial(vit_loss, loss) for which, loss in losses.items()},
        lambda loss, model, batch: {"held_out": loss(model, batch), "accuracy": _accuracy(model, *batch)},
        "images",
        options.batch * options.accumulate,
    )


def _accuracy(model: ViT, patches: jax.Array, labels: jax.Array) -> jax.Array:
    logits = jax.vmap(model)(patches.astype(model.patches.weight.dtype))
    return jnp.mean(jnp.argmax(logits, axis=-1) == labels, dtype=jnp.float32)


def _config(options: RunOptions, length: int) -> Config:
    return Config(options.layers, options.width, 4 * options.width, options.heads, length)
