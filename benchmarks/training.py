"""One step of training a GPT and a ViT, in time and memory: a model of `equinox.nn`, the same after `fuse`, the same with the
attention of `jax.nn`, and PyTorch's."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqxcallback as eqxc
from eqxcallback import ops
from models.transformer import gpt_loss, plain_loss, vit_loss

from . import _torch_transformers as _torch, _transformers as _models, shapes
from ._contestants import normal, to_torch, torch_ways
from ._probes import FMA, PAIRS, multiply_operations, multiply_runner
from ._rows import BEST, OURS, Goal, Row, Setting, best_of
from ._timing import Memory, Race, Runner, waited_for


GPT = dataclasses.replace(shapes.GPT2, layers=4, vocabulary=32_000)
VIT = dataclasses.replace(shapes.VIT, layers=2)
IMAGES = 8
# How many times as fast as Equinox.
_GOALS = {jnp.float32: 1.3, jnp.bfloat16: 1.8}
_JAX_NN = "Equinox with jax.nn"  # a family of its own: the goals are relative to Equinox as it is


def measure(setting: Setting) -> Iterator[Row]:
    for task, dtype in tasks(setting):
        yield from _rows(setting, task, dtype, (Goal(BEST), Goal("Equinox", _GOALS[dtype])))


def tasks(setting: Setting) -> Iterator[tuple["Task", Any]]:
    """Each model, with each dtype."""
    for dtype in _GOALS:
        yield from ((task, dtype) for task in (_gpt(setting), _vit(setting)))


def program(task: "Task", dtype: Any, which: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """One step of a contestant: a function of the model's arrays, the optimizer's state and the batch, and these."""
    model = task.new(task.model, dtype)
    if which.startswith(OURS):
        model = eqxc.fuse(model).model
    elif which == _JAX_NN:
        model = _models.with_jax_nn(model)
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    init, train = _models.step(task.losses[which])

    def of_arrays(arrays: Any, state: Any, batch: Any) -> Any:
        return train(arrays, static, state, batch)

    return of_arrays, (arrays, init(arrays), _batch(task, dtype))


def _batch(task: "Task", dtype: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, task.batch)


@dataclasses.dataclass(frozen=True)
class Task:
    """**Attributes:**

    - `case`: what is trained.
    - `tokens`: of a step.
    - `operations`: of the products of a step, which are three for each one of the forward pass.
    - `batch`: the data of a step.
    - `losses`: of contestants in JAX, which are functions of a model and a batch.
    - `torch`: a model of PyTorch, with the arrays of one of Equinox, and a function of it that returns a loss.
    """

    case: str
    model: shapes.Model
    new: Callable[[shapes.Model, Any], Any]
    tokens: int
    operations: float
    batch: Any
    losses: dict[str, Callable[[Any, Any], jax.Array]]
    torch: Callable[[Any], tuple[Any, Callable[..., Any]]]


def _gpt(setting: Setting) -> Task:
    model = shapes.TINY_GPT if setting.tiny else GPT
    tokens = np.random.default_rng(0).integers(0, model.vocabulary, (1, model.length + 1), np.int32)
    loss = functools.partial(functools.partial, gpt_loss)
    return Task(
        f"{model.name}, {model.layers} layers, {model.length} tokens",
        model,
        _models.gpt,
        model.length,
        3 * (_operations(model, model.length) + 2 * model.length * model.embedding * model.vocabulary),
        jnp.asarray(tokens),
        {
            OURS: loss(functools.partial(ops.linear_cross_entropy, reduction="mean")),
            f"{OURS}: all logits": loss(_all_logits),
            "Equinox": loss(plain_loss),
            _JAX_NN: loss(plain_loss),
        },
        functools.partial(_torch.gpt, model),
    )


def _vit(setting: Setting) -> Task:
    model = dataclasses.replace(shapes.TINY_GPT, causal=False) if setting.tiny else VIT
    count = 2 if setting.tiny else IMAGES
    patches = normal(1, count, model.length - 1, _models.PATCH)
    labels = jnp.arange(count, dtype=jnp.int32) * 7 % model.vocabulary
    loss = functools.partial(functools.partial, vit_loss)
    first = 2 * (model.length - 1) * count * _models.PATCH * model.embedding  # whose input has no gradient
    return Task(
        f"{model.name}, {model.layers} layers, {count} images",
        model,
        _models.vit,
        model.length * count,
        3 * count * _operations(model, model.length) + 2 * first,
        (patches, labels),
        {
            OURS: loss(ops.softmax_cross_entropy),
            "Equinox": loss(optax.softmax_cross_entropy_with_integer_labels),
            _JAX_NN: loss(optax.softmax_cross_entropy_with_integer_labels),
        },
        functools.partial(_torch.vit, model),
    )


def _all_logits(x: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    return ops.softmax_cross_entropy(ops.linear(x, weight), labels)


def _operations(model: shapes.Model, length: int) -> float:
    """Count the operations in the products of all layers, forward, for one sequence. Causal attention is counted as half."""
    matrices = sum(rows * columns for rows, columns in model.matrices.values())
    return model.layers * (2 * length * matrices + model.attention(1, length).flops)


def _rows(setting: Setting, task: Task, dtype: Any, goals: tuple[Goal, ...]) -> Iterator[Row]:
    made: dict[str, Callable[[], Runner]] = {
        contestant: functools.partial(_runner, setting, task, dtype, contestant) for contestant in task.losses
    }
    for name, prepare in torch_ways(setting.tiny).items():
        made[name] = functools.partial(_torch_runner, task, dtype, prepare)
    probe = PAIRS if dtype == jnp.bfloat16 else FMA
    operations = multiply_operations(setting, probe)
    if operations:  # as many tokens as have so many of them
        made[probe] = functools.partial(multiply_runner, setting, probe)
    case = f"{task.case}, {jnp.dtype(dtype).name}"
    # PyTorch rounds the gradients of bf16 more often.
    tolerance = 0.2 if dtype == jnp.bfloat16 else 1e-3
    race = setting.race(made)
    tokens = {probe: operations / task.operations * task.tokens}
    yield Row(case, "tokens/s", task.tokens, race, goals, tokens, tolerance=tolerance)
    # What the process grows by has the new model and the optimizer's state in it, which training writes over the old ones.
    fastest = best_of({name: timing.median for name, timing in race.seconds.items()}, "s").values()
    planned = {
        name: Memory(memory.temporary, memory.temporary)
        for name, memory in race.memory.items()
        if memory.temporary and name in fastest  # a formulation that is slower may need less
    }
    race.memory.clear()
    same = {name: difference for name, difference in race.differences.items() if name in planned}
    yield Row(
        f"XLA's memory for {case}",
        "MB",
        1.0,
        Race({}, {}, same, planned),
        (Goal("Equinox", 2.0),),
        tolerance=tolerance,
    )


def _runner(setting: Setting, task: Task, dtype: Any, which: str) -> Runner:
    step, arguments = program(task, dtype, which)
    made = setting.clock.runner(step, *arguments)
    result = made.result
    assert result is not None
    return made._replace(result=lambda: _seen(*result()[::2]))


def _seen(loss: Any, state: Any) -> tuple[Any, Any]:
    """Return what contestants are compared by: the loss, and what the optimizer keeps of the gradient of the first norm."""
    return loss, state[0].mu.blocks[0].attention_norm.weight


def _torch_runner(task: Task, dtype: Any, prepare: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Runner:
    model = task.new(task.model, dtype)
    module, loss = task.torch(model)
    data = jax.tree.map(to_torch, _batch(task, dtype))
    train = _torch.step(module, prepare(functools.partial(loss, module, data)))
    return waited_for(train)
