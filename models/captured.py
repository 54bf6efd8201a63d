"""Programs that a GPU runs by one launch."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

import eqxcallback as eqxc


_OPTIONS = eqxc.jit_captured(lambda: None).compiler_options


def compile_captured(function: Callable[..., Any], *shapes: Any, donate_argnums: int | Sequence[int] = ()) -> Any:
    """Compile `function` as [`eqxcallback.jit_captured`][] does, for flat arguments of these shapes.

    On a GPU XLA records the steps of the program into a command buffer. On a CPU it is the program that `jax.jit` makes.
    """
    lowered = jax.jit(function, donate_argnums=donate_argnums).lower(*shapes)
    return lowered.compile(compiler_options=dict(_OPTIONS))
