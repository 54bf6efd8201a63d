"""Norms, rotation, gate and loss: the bytes that each has to move, against those that a copy moves in the same run."""

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eqxcallback import ops, reference

from ._gpu_attention import to_torch
from ._gpu_probe import COPY, copy_runner
from ._gpu_rows import OURS, Goal, Row, Setting
from ._gpu_timing import Runner, torch_runner


class Case(NamedTuple):
    """**Attributes:**

    - `formulations`: of XLA: the best of them is its figure.
    - `torch`: a function of `torch.nn.functional` and the arguments as tensors. None: there is none in one kernel.
    - `moved`: arrays of the size of the first operand that the forward pass reads and writes, and with the backward pass.
    - `differentiable`: the operands that are differentiated, or none.
    """

    name: str
    ours: Callable[..., jax.Array]
    formulations: dict[str, Callable[..., jax.Array]]
    torch: Callable[..., Any] | None
    args: Callable[[bool], tuple[Any, ...]]
    moved: tuple[float, float]
    differentiable: tuple[int, ...]


def normal(*shape: int, dtype: Any = jnp.bfloat16, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def _rows(tiny: bool) -> tuple[int, int]:
    return (8, 64) if tiny else (16_384, 4096)


def _norm_args(tiny: bool, parameters: int) -> tuple[Any, ...]:
    rows, size = _rows(tiny)
    return normal(rows, size), *(normal(size, dtype=jnp.float32, seed=i + 1) for i in range(parameters))


def _rotary_args(tiny: bool) -> tuple[Any, ...]:
    batch, length, heads, size = (1, 8, 2, 16) if tiny else (4, 4096, 32, 128)
    return normal(batch, length, heads, size), *ops.rotary_table(jnp.arange(length), size)


def _loss_args(tiny: bool) -> tuple[Any, ...]:
    rows, vocabulary = (8, 64) if tiny else (8192, 32_000)
    return normal(rows, vocabulary), jnp.arange(rows, dtype=jnp.int32) % vocabulary


def _interleaved_rotation(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """The halves joined by a roll, which XLA fuses into one pass."""
    wide = x.astype(jnp.float32)
    half = x.shape[-1] // 2
    cos, sin = (jnp.concatenate([table, table], -1)[None, :, None] for table in (cos, sin))
    sign = jnp.where(jnp.arange(x.shape[-1]) < half, -1.0, 1.0)
    return (wide * cos + jnp.roll(wide, half, -1) * sin * sign).astype(x.dtype)


def _loss_of_sums(logits: jax.Array, labels: jax.Array) -> jax.Array:
    wide = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(wide, labels[:, None], -1)[:, 0]
    return jax.nn.logsumexp(wide, -1) - chosen


def _torch_norm(name: str, functional: Any, x: Any, *parameters: Any) -> Any:
    return getattr(functional, name)(x, x.shape[-1:], *(parameter.to(x.dtype) for parameter in parameters), eps=1e-5)


# The most telling ones first.
CASES = [
    Case(
        "rms_norm",
        ops.rms_norm,
        {"reference": functools.partial(reference.rms_norm, eps=1e-5)},
        functools.partial(_torch_norm, "rms_norm"),
        lambda tiny: _norm_args(tiny, 1),
        (2, 5),
        (0, 1),
    ),
    Case(
        "softmax_cross_entropy",
        ops.softmax_cross_entropy,
        {"reference": reference.softmax_cross_entropy, "sums": _loss_of_sums},
        lambda functional, x, labels: functional.cross_entropy(x, labels.long(), reduction="none"),
        _loss_args,
        (1, 3),
        (0,),
    ),
    Case(
        "swiglu",
        ops.swiglu,
        {"reference": reference.swiglu, "jax.nn": lambda gate, up: jax.nn.silu(gate) * up},
        lambda functional, gate, up: functional.silu(gate) * up,
        lambda tiny: (normal(*_rows(tiny)), normal(*_rows(tiny), seed=1)),
        (3, 8),
        (0, 1),
    ),
    Case(
        "layer_norm",
        ops.layer_norm,
        {"reference": functools.partial(reference.layer_norm, eps=1e-5)},
        functools.partial(_torch_norm, "layer_norm"),
        lambda tiny: _norm_args(tiny, 2),
        (2, 5),
        (0, 1, 2),
    ),
    Case(
        "rotary_embedding",
        ops.rotary_embedding,
        {"reference": reference.rotary_embedding, "roll": _interleaved_rotation},
        None,
        _rotary_args,
        (2, 2),
        (),
    ),
]


def measure(setting: Setting) -> Iterator[Row]:
    copy, copied = copy_runner(setting)
    for case in CASES[:3] if setting.quick and not setting.tiny else CASES:
        args = case.args(setting.tiny)
        for backward in (False, True) if case.differentiable else (False,):
            if not setting.has_time():
                return
            clocked = functools.partial(_clocked, setting, case, args, backward)
            contestants: dict[str, Callable[[], Runner]] = {OURS: functools.partial(clocked, case.ours)}
            for name, f in case.formulations.items():
                contestants[f"XLA, {name}"] = functools.partial(clocked, f)
            if setting.torch and case.torch is not None:
                contestants["torch"] = functools.partial(_torch, case.torch, args, case.differentiable, backward)
            contestants[COPY] = copy
            work = case.moved[backward] * args[0].nbytes
            name = f"{case.name} {'forward + backward' if backward else 'forward'}, {list(args[0].shape)}"
            race = setting.race(contestants)
            race.differences.pop(COPY, None)
            yield Row(name, "GB/s", work, race, Goal(COPY, 0.85), more_work={COPY: copied})


def _clocked(
    setting: Setting, case: Case, args: tuple[Any, ...], backward: bool, f: Callable[..., jax.Array]
) -> Runner:
    if not backward:
        return setting.clock.runner(f, *args)

    def gradients(cotangent: Any, *args: Any) -> Any:
        def of_floats(*floats: Any) -> Any:
            given = iter(floats)
            return f(*(next(given) if i in case.differentiable else x for i, x in enumerate(args)))

        out, vjp = jax.vjp(of_floats, *(args[i] for i in case.differentiable))
        return *vjp(cotangent.astype(out.dtype)), out

    result = jax.eval_shape(case.ours, *args)
    return setting.clock.runner(gradients, normal(*result.shape, seed=9, dtype=result.dtype), *args)


def _torch(f: Callable[..., Any], args: tuple[Any, ...], differentiable: tuple[int, ...], backward: bool) -> Runner:
    functional = importlib.import_module("torch").nn.functional
    torch: Any = importlib.import_module("torch")
    tensors = [to_torch(x) for x in args]
    if not backward:
        return torch_runner(lambda: f(functional, *tensors))
    inputs = [tensors[i].clone().requires_grad_(True) for i in differentiable]
    for i, tensor in zip(differentiable, inputs, strict=True):
        tensors[i] = tensor
    shape = f(functional, *tensors).shape
    cotangent = to_torch(normal(*shape, seed=9, dtype=jnp.bfloat16))

    def run() -> Any:
        out = f(functional, *tensors)
        return torch.autograd.grad(out, inputs, cotangent.to(out.dtype))

    return torch_runner(run)
