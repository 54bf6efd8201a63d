"""Attention against XLA's best formulation, `jax.nn`, Equinox's core and PyTorch."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from eqxcallback import ops
from eqxcallback.ops.attention import _reference as reference

from . import _attention_peers as peers, _documents, shapes
from ._contestants import Pass, normal, of_pass, operands, torch_call
from ._probes import FMA, multiply_operations, multiply_runner
from ._rows import BEST, OURS, Goal, Row, Setting
from ._timing import Runner, waited_for


Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
# A backward pass is five products of the size of the two forward.
_WORK: dict[Pass, float] = {"forward": 1.0, "forward + backward": 3.5}


def on_jax(causal: bool, scale: float) -> dict[str, Attend]:
    in_blocks = functools.partial(reference.attention, causal=causal, scale=scale)
    return {
        OURS: functools.partial(ops.attention, causal=causal),
        "XLA: heads inside": functools.partial(peers.heads_inside, causal),
        "XLA: heads first": functools.partial(peers.heads_first, causal),
        "XLA: head by head": functools.partial(peers.head_by_head, causal),
        "XLA: blocks of queries": in_blocks,
        "jax.nn": functools.partial(jax.nn.dot_product_attention, is_causal=causal),
        "Equinox": lambda q, k, v: peers.equinox(peers.seen(q.shape[1], k.shape[1]) if causal else None, q, k, v),
    }


def contestants(setting: Setting, shape: shapes.Attention, dtype: Any, which: Pass) -> dict[str, Callable[[], Runner]]:
    args = [normal(i, *operand_shape, dtype=dtype) for i, operand_shape in enumerate(shape.operand_shapes)]
    fs = on_jax(shape.causal, 1 / math.sqrt(shape.size))
    given = operands(fs[OURS], which, args)

    def runner(f: Attend) -> Runner:
        return setting.clock.runner(of_pass(f, which, (0, 1, 2)), *given)

    def of_torch() -> Runner:
        options = {"is_causal": shape.causal, "enable_gqa": shape.heads != shape.kv_heads}
        return waited_for(torch_call(functools.partial(peers.of_torch, options), which, (0, 1, 2), given))

    made = {name: functools.partial(runner, f) for name, f in fs.items()}
    return made | ({"torch": of_torch} if setting.torch else {})


def goals(shape: shapes.Attention, dtype: Any, which: Pass) -> tuple[Goal, ...]:
    """Short sequences fill no whole blocks of the kernel: they have no goal relative to the probe."""
    if dtype != jnp.float32 or shape.length < 512:
        return (Goal(BEST),)
    return Goal(BEST), Goal("probe", 0.85 if which == "forward" and not shape.causal else 0.8)


# The most telling ones first.
_GPT2_BOTH_WAYS = shapes.GPT2.attention(1)._replace(causal=False)
_ROWS: list[tuple[str, shapes.Attention, Any, Pass]] = [
    ("GPT-2", shapes.GPT2.attention(1), jnp.float32, "forward"),
    ("GPT-2's size", _GPT2_BOTH_WAYS, jnp.float32, "forward"),
    ("GPT-2", shapes.GPT2.attention(1), jnp.float32, "forward + backward"),
    ("GPT-2's size", _GPT2_BOTH_WAYS, jnp.float32, "forward + backward"),
    ("BERT-base", shapes.BERT.attention(2), jnp.float32, "forward"),
    ("SmolLM2-135M", shapes.SMOLLM2.attention(1, 2048), jnp.float32, "forward"),
    ("ViT-B", shapes.VIT.attention(8), jnp.float32, "forward"),
    ("GPT-2", shapes.GPT2.attention(1), jnp.bfloat16, "forward"),
    ("BERT-base", shapes.BERT.attention(2), jnp.bfloat16, "forward"),
]
_TINY: list[tuple[str, shapes.Attention, Any, Pass]] = [
    ("tiny", shapes.TINY.attention(2, 20), jnp.float32, "forward + backward"),
    ("tiny", shapes.TINY.attention(1, 20)._replace(causal=False), jnp.bfloat16, "forward"),
]


def measure(setting: Setting) -> Iterator[Row]:
    for model, shape, dtype, which in _TINY if setting.tiny else _ROWS[:4] if setting.quick else _ROWS:
        made = contestants(setting, shape, dtype, which)
        if dtype == jnp.float32:
            made[FMA] = functools.partial(multiply_runner, setting)
        yield Row(
            f"{which}, {jnp.dtype(dtype).name}, {model}: {shape}",
            "GFLOP/s",
            _WORK[which] * shape.flops,
            setting.race(made),
            goals(shape, dtype, which),
            more_work={FMA: multiply_operations(setting)},
            tolerance=1e-4 if dtype == jnp.float32 else 0.05,
        )
    yield from _documents.rows(setting, _WORK)
    yield _memory(setting)


def _memory(setting: Setting) -> Row:
    """Measure the memory of a call, beside operands and results."""
    shape = shapes.GPT2.attention(1, 4096)._replace(heads=4, kv_heads=4, causal=False)
    shape = shapes.TINY.attention(1, 20) if setting.tiny else shape
    race = setting.race(contestants(setting, shape, jnp.float32, "forward"), timed=False)
    limit = 1.0 * setting.threads
    return Row(f"memory of one call, float32, {shape}", "MB", 1, race, (Goal(limit),), tolerance=1e-4)
