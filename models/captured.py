"""Programs that a GPU runs by one launch."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

import eqxcallback as eqxc


_OPTIONS = eqxc.jit_captured(lambda: None).compiler_options


def jit_captured(function: Callable[..., Any]) -> Any:
    """`jax.jit`, of Modules too, with the options of [`eqxcallback.jit_captured`][].

    On a GPU XLA records the steps of the program into a command buffer. On a CPU it is the program that `jax.jit` makes.
    """
    return jax.jit(function, compiler_options=dict(_OPTIONS))


def compile_captured(function: Callable[..., Any], *shapes: Any, donate_argnums: int | Sequence[int] = ()) -> Any:
    """Compile `function` as `jit_captured` does, for flat arguments of these shapes."""
    lowered = jax.jit(function, donate_argnums=donate_argnums).lower(*shapes)
    return lowered.compile(compiler_options=dict(_OPTIONS))
