"""Layers outside of any program."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax


def compiled(function: Callable[..., object]) -> Callable[..., Any]:
    """`function` of arrays, and of static options by keyword, as one program where it is called outside of any: one dispatch,
    and one for its gradient, in place of one for each step. Within a program its steps are as they would be without this.
    """
    parameters = inspect.signature(function).parameters.values()
    static = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    program = jax.jit(function, static_argnames=static, inline=True)

    @functools.wraps(function)
    def call(*arrays: object, implementation: str, **options: object) -> Any:
        # A Python kernel outside of any program raises its own exception.
        run = function if implementation == "python" else program
        return run(*arrays, implementation=implementation, **options)

    return call
