"""Norms, gates and rotation, forward and backward: GB/s of what each has to move, against XLA, Equinox and PyTorch."""

import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from . import shapes
from ._cases import CASES, Case, case_contestants, of_ensemble
from ._contestants import Pass
from ._probes import COPY, copied_bytes, copy_runner
from ._rows import BEST, Goal, Row, Setting
from ._timing import waited_for_on


_F32, _BF16 = jnp.float32, jnp.bfloat16
_ACTIVATIONS = ("swiglu", "geglu", "gelu")
_NAMES = [name for name in CASES if name != "softmax_cross_entropy"]  # which has a suite of its own
# So many tokens at once: a sequence of GPT-2, eight of BERT-base, a prompt, and many prompts, which no cache has room for.
_LARGE = "SmolLM2-135M, many"
_ROWS = {"GPT-2": 1024, "BERT-base": 4096, "SmolLM2-135M": 512, _LARGE: 32 * 512}


def _shapes(name: str, setting: Setting) -> dict[str, tuple[int, ...]]:
    models = {model.name: model for model in (shapes.GPT2, shapes.BERT, shapes.SMOLLM2)} | {_LARGE: shapes.SMOLLM2}
    rows = _ROWS
    if setting.tiny:
        models, rows = {"tiny": shapes.TINY}, {"tiny": 6}
    if name == "rotary_embedding":
        return {key: (1, rows[key], model.heads, model.head_size) for key, model in models.items()}
    sizes = {key: model.hidden if name in _ACTIVATIONS else model.embedding for key, model in models.items()}
    return {key: (rows[key], size) for key, size in sizes.items()}


def measure(setting: Setting) -> Iterator[Row]:
    for name in _NAMES:
        case, of_models = CASES[name], _shapes(name, setting)
        for dtype in (_F32, _BF16):
            passes: tuple[Pass, ...] = ("forward", "backward")
            for which in passes[: 1 if setting.tiny and dtype == _BF16 else 2]:
                # The others differ in size only.
                chosen = list(of_models.items())[: 1 if setting.quick or which == "backward" or dtype == _BF16 else 4]
                for model, shape in chosen:
                    yield _row(setting, case, which, dtype, model, shape)
    for name in ("layer_norm", "rms_norm"):
        for dtype in (_F32, _BF16):
            for which in ("forward", "backward"):
                yield _row(setting, of_ensemble(CASES[name]), which, dtype, *_ensemble(setting))


def _ensemble(setting: Setting) -> tuple[str, tuple[int, ...]]:
    return ("tiny", (2, 3, 8)) if setting.tiny else ("8 of GPT-2", (8, 256, shapes.GPT2.embedding))


def _row(setting: Setting, case: Case, which: Pass, dtype: Any, model: str, shape: tuple[int, ...]) -> Row:
    args = case.args(shape, dtype)
    contestants = case_contestants(setting, case, which, args, waited_for_on)
    contestants[COPY] = functools.partial(copy_runner, setting, args[0].nbytes)
    return Row(
        f"{case.name} {which}, {jnp.dtype(dtype).name}, {model} {list(shape)}",
        "GB/s",
        (case.moved[0] if which == "forward" else case.moved[1] - case.moved[0]) * args[0].nbytes,
        setting.race(contestants),
        (Goal(BEST), *((Goal("probe", 0.9),) if model == _LARGE else ())),
        more_work={COPY: copied_bytes(setting, args[0].nbytes)},
        # Gradients of parameters are sums over rows, which PyTorch rounds to bf16 as it goes.
        tolerance=1e-3 if dtype == _F32 else 0.1,
    )
