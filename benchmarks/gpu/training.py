"""One step of a GPT's training, in time and memory; and how fast a prompt is read."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import eqxcallback as eqxc
from eqxcallback import ops
from models.transformer import gpt_loss, plain_loss

from .. import _transformers as _models, shapes
from .._rows import OURS, Goal, Row, Setting
from .._timing import Runner
from . import decode


LAYERS, BATCH, VOCABULARY = 4, 8, 32_000


def measure(setting: Setting) -> Iterator[Row]:
    for dtype in (jnp.bfloat16,) if setting.tiny or setting.quick else (jnp.bfloat16, jnp.float32):
        if not setting.has_time():
            return
        yield from _training(setting, dtype)
    if setting.has_time():
        yield _prompt(setting)


def _training(setting: Setting, dtype: Any) -> Iterator[Row]:
    model = shapes.TINY if setting.tiny else dataclasses.replace(shapes.GPT2, layers=LAYERS, vocabulary=VOCABULARY)
    batch = 2 if setting.tiny else BATCH
    tokens = np.random.default_rng(0).integers(0, model.vocabulary, (batch, model.length + 1), np.int32)

    def runner(fused: bool, loss: Callable[..., jax.Array]) -> Runner:
        gpt = _models.gpt(model, dtype)
        arrays, static = eqx.partition(eqxc.fuse(gpt).model if fused else gpt, eqx.is_inexact_array)
        init, train = _models.step(functools.partial(gpt_loss, loss))

        def of_arrays(arrays: Any, state: Any, tokens: Any) -> Any:
            return train(arrays, static, state, tokens)

        made = setting.clock.runner(of_arrays, arrays, init(arrays), jnp.asarray(tokens))
        result = made.result
        assert result is not None
        return made._replace(result=lambda: result()[0])  # the loss

    made: dict[str, Callable[[], Runner]] = {
        OURS: functools.partial(runner, True, functools.partial(ops.linear_cross_entropy, reduction="mean")),
        f"{OURS}: all logits": functools.partial(runner, True, _our_loss),
        "Equinox": functools.partial(runner, False, plain_loss),
    }
    case = f"a step of {model.name}, {model.layers} layers, {batch} x {model.length} tokens, {jnp.dtype(dtype).name}"
    race = setting.race(made)
    yield Row(case, "tokens/s", float(batch * model.length), race, (Goal("Equinox", 1.5),))
    if not setting.has_time():
        return
    yield Row(f"memory of {case}", "MB", 1.0, setting.race(made, timed=False), (Goal("Equinox", 2.0),))


def _our_loss(x: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    return ops.softmax_cross_entropy(jnp.einsum("...f,cf->...c", x, weight), labels)


def _prompt(setting: Setting) -> Row:
    llm, which = decode.model(setting.tiny)
    length = 16 if setting.tiny else 2048
    weights, tree = jax.tree.flatten(llm)
    tokens = jnp.arange(length, dtype=jnp.int32) * 7 % llm.config.vocab_size

    def read(weights: Any, tokens: jax.Array, cache: Any) -> Any:
        return jax.tree.unflatten(tree, weights)(tokens, cache)

    cache = llm.init_cache(2 * length)
    runners = {
        name: functools.partial(setting.clock.runner, read, weights, tokens, cache, compiler_options=options)
        for name, options in decode.options().items()
    }
    return Row(f"a prompt of {length} tokens, {which}", "tokens/s", float(length), setting.race(runners))
