"""The loss of a language model over its logits: GB/s, against XLA, optax and PyTorch."""

import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from . import shapes
from ._cases import CASES, case_contestants
from ._contestants import Pass
from ._probes import READ, read_bytes, read_runner
from ._rows import BEST, Goal, Row, Setting
from ._timing import waited_for_on


# With the vocabulary of Llama 2, which the goals were measured with.
_SHAPES: dict[str, tuple[tuple[int, int], Any]] = {
    "Llama 2": ((512, 32_000), jnp.float32),
    "Llama 2, bf16": ((512, 32_000), jnp.bfloat16),
    "SmolLM2-135M": ((512, shapes.SMOLLM2.vocabulary), jnp.float32),
    "GPT-2": ((1024, shapes.GPT2.vocabulary), jnp.bfloat16),
}


def measure(setting: Setting) -> Iterator[Row]:
    case = CASES["softmax_cross_entropy"]
    chosen = {key: _SHAPES[key] for key in list(_SHAPES)[: 2 if setting.quick else None]}
    if setting.tiny:
        chosen = {f"tiny, {jnp.dtype(dtype).name}": ((5, 70), dtype) for dtype in (jnp.float32, jnp.bfloat16)}
    for model, (shape, dtype) in chosen.items():
        args = case.args(shape, dtype)
        passes: tuple[Pass, ...] = ("forward", "forward + backward")
        for which, moved in zip(passes, case.moved, strict=True):
            contestants = case_contestants(setting, case, which, args, waited_for_on)
            contestants[READ] = functools.partial(read_runner, setting)
            yield Row(
                f"{which}, {model} {list(shape)}",
                "GB/s",
                moved * args[0].nbytes,
                setting.race(contestants),
                (Goal(BEST), Goal("probe", 0.8)),
                more_work={READ: read_bytes(setting)},
                tolerance=1e-4 if dtype == jnp.float32 else 0.05,
            )
