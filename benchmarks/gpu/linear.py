"""Layers over quantised weights, of one row to many; a gated pair of layers; and the loss of a large vocabulary, with the layer
before it."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from eqxcallback import ops

from .._contestants import Pass, normal, of_pass, operands, torch, torch_call
from .._rows import OURS, Goal, Row, Setting
from .._timing import Runner
from ..linear import Apply, expanded, f32, ours, quantized, weights
from ..programs import quantized_linear_by_tensor_cores
from . import of_tokamax
from .probe import COPY, copy_runner
from .torch_timing import torch_runner


ENCODINGS = ("Q4_1", "Q8_0", "int8")
ROWS = (1, 2, 4, 8, 64, 2048)
# Up to these, a layer is bound by reading its weights.
_FEW_ROWS = 8
# And up to these, there is a kernel by tensor cores, which runs by default where it is the faster one.
_ROWS_BY_MMA = 64
SIZE, TINY_SIZE = (14_336, 4096), (64, 64)
# Rows, features, and features within.
GATED, TINY_GATED = [(8192, 4096, 14_336)], [(8, 64, 32)]
# Rows, features and classes.
LOSSES, TINY_LOSSES = [(8192, 4096, 32_000), (8192, 4096, 128_256)], [(8, 16, 300)]


def measure(setting: Setting) -> Iterator[Row]:
    for rows in (3,) if setting.tiny else ROWS[::2] if setting.quick else ROWS:
        for encoding in ENCODINGS:
            if not setting.has_time():
                return
            yield _quantized(setting, encoding, rows)
    for sizes in TINY_GATED if setting.tiny else GATED:
        for which in ("forward", "forward + backward"):
            if not setting.has_time():
                return
            yield _gated(setting, sizes, which)
    for sizes in TINY_LOSSES if setting.tiny else LOSSES[:1] if setting.quick else LOSSES:
        for which in ("forward", "forward + backward"):
            if not setting.has_time():
                return
            yield _loss(setting, sizes, which)


def _quantized(setting: Setting, encoding: str, rows: int) -> Row:
    size = TINY_SIZE if setting.tiny else SIZE
    small, wide = quantized(encoding, weights([size])[0])
    x, wide = normal(9, rows, size[1], dtype=jnp.bfloat16), wide.astype(jnp.bfloat16)

    def runner(apply: Apply, parts: Any) -> Runner:
        return setting.clock.runner(apply, x, parts)

    made: dict[str, Callable[[], Runner]] = {
        OURS: functools.partial(runner, ours(encoding), small),
        "XLA: expanded in the program": functools.partial(runner, expanded(encoding), small),
        "XLA: bf16 weights": functools.partial(runner, f32, wide),
    }
    if encoding != "int8" and rows <= _ROWS_BY_MMA:
        made["tensor cores"] = functools.partial(runner, quantized_linear_by_tensor_cores(encoding), small)
    case = f"{rows} rows, {encoding}, {size[1]} to {size[0]}"
    if rows > _FEW_ROWS:
        return Row(case, "TFLOP/s", 2.0 * rows * wide.size, setting.race(made), (Goal("XLA", 1.0),))
    made[COPY], copied = copy_runner(setting)
    read = float(sum(leaf.nbytes for leaf in jax.tree.leaves(small)))
    return Row(case, "GB/s", read, setting.race(made), (Goal(COPY, 0.75),), more_work={COPY: copied})


def _gated(setting: Setting, sizes: tuple[int, int, int], which: Pass) -> Row:
    """Two products, and the gate between them."""
    rows, features, within = sizes
    x = normal(0, rows, features, dtype=jnp.bfloat16)
    gate, up = (normal(i, features, within, dtype=jnp.bfloat16) * jnp.bfloat16(features**-0.5) for i in (1, 2))

    def ours(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
        return ops.swiglu(x @ gate, x @ up)

    def xla(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
        return jax.nn.silu(x @ gate) * (x @ up)

    given = operands(ours, which, (x, gate, up))
    contestants = {OURS: ours, "XLA": xla, **of_tokamax.gated_linear(setting)}
    made = {
        name: functools.partial(setting.clock.runner, of_pass(f, which, (0, 1, 2)), *given)
        for name, f in contestants.items()
    }
    work = 4.0 * rows * features * within * (3 if which == "forward + backward" else 1)
    case = f"gated linear {which}, {rows} rows, {features} to {within}"
    return Row(case, "TFLOP/s", work, setting.race(made), (Goal("XLA", 1.0),))


def _logits(x: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    """All of them in memory."""
    logits = jnp.einsum("rf,cf->rc", x, weight, preferred_element_type=jnp.float32)
    return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]


def _loss(setting: Setting, sizes: tuple[int, int, int], which: Pass) -> Row:
    rows, features, classes = sizes
    scale = jnp.bfloat16(features**-0.5)
    x, weight = normal(0, rows, features, dtype=jnp.bfloat16), normal(1, classes, features, dtype=jnp.bfloat16) * scale
    given = operands(ops.linear_cross_entropy, which, (x, weight, jnp.arange(rows, dtype=jnp.int32) * 7 % classes))

    def runner(f: Callable[..., jax.Array]) -> Runner:
        return setting.clock.runner(of_pass(f, which, (0, 1)), *given)

    made: dict[str, Callable[[], Runner]] = {
        OURS: functools.partial(runner, ops.linear_cross_entropy),
        "XLA: all logits": functools.partial(runner, _logits),
        "XLA: logits, and our loss": functools.partial(
            runner, lambda x, weight, labels: ops.softmax_cross_entropy(x @ weight.T, labels)
        ),
    }
    if setting.torch:
        made["torch"] = functools.partial(_of_torch, which, given)
    work = 2.0 * rows * features * classes * (3 if which == "forward + backward" else 1)
    case = f"linear_cross_entropy {which}, {rows} rows, {features} to {classes}"
    return Row(case, "TFLOP/s", work, setting.race(made), (Goal("XLA", 0.9),))


def _of_torch(which: Pass, given: tuple[Any, ...]) -> Runner:
    functional = torch().nn.functional

    def f(x: Any, weight: Any, labels: Any) -> Any:
        return functional.cross_entropy(functional.linear(x, weight), labels.long(), reduction="none")

    return torch_runner(functools.partial(torch_call, f, which, (0, 1)), given)
