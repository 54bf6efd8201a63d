"""Norms, rotation, gate and loss: the bytes that each has to move, against those that a copy moves in the same run."""

from collections.abc import Iterator

import jax.numpy as jnp

from .._cases import CASES, case_contestants
from .._contestants import Pass
from .._rows import Goal, Row, Setting
from . import of_tokamax
from .probe import COPY, copy_runner
from .torch_timing import torch_runner


_NAMES = [name for name in CASES if name != "geglu"]  # whose kernel is that of swiglu
_SHAPES = {"rotary_embedding": (4, 4096, 32, 128), "softmax_cross_entropy": (8192, 32_000)}
_TINY = {"rotary_embedding": (1, 8, 2, 16)}


def measure(setting: Setting) -> Iterator[Row]:
    copy, copied = copy_runner(setting)
    for name in _NAMES[:3] if setting.quick and not setting.tiny else _NAMES:
        case = CASES[name]
        case = case._replace(peers={**case.peers, **of_tokamax.norms(setting).get(name, {})})
        shape = _TINY.get(name, (8, 64)) if setting.tiny else _SHAPES.get(name, (16_384, 4096))
        args = case.args(shape, jnp.bfloat16)
        for backward in (False, True) if case.differentiable else (False,):
            if not setting.has_time():
                return
            which: Pass = "forward + backward" if backward else "forward"
            contestants = case_contestants(setting, case, which, args, torch_runner)
            contestants[COPY] = copy
            work = case.moved[backward] * args[0].nbytes
            yield Row(
                f"{name} {which}, {list(shape)}",
                "GB/s",
                work,
                setting.race(contestants),
                (Goal(COPY, 0.85),),
                more_work={COPY: copied},
            )
