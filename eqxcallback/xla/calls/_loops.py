"""Effects stay in their loops."""

import sys
from collections.abc import Callable
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import partial_eval

from ...core import Value


def stays_in_loops(primitive: Primitive, has_effect: Callable[[Any], bool]) -> None:
    """Keep `primitive` inside of loops if `has_effect` of its parameters is true. Under `grad`, JAX computes once, before a
    `scan`, what does not change in it, and also what has an effect.
    """

    def rule(trace: Any, *tracers: Value, **params: object) -> Any:
        if has_effect(params) and _is_hoisting():
            tracers = tuple(map(trace.instantiate_const, tracers))
        return trace.default_process_primitive(primitive, tracers, params)

    partial_eval.custom_partial_eval_rules[primitive] = rule


def _is_hoisting() -> bool:
    """JAX does so by evaluating the loop's body partially, as it does for other reasons. Only its function tells them apart.

    Noticed by: tests/debug/test_tap_transformations.py.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_scan_known_hoisting":
            return True
        frame = frame.f_back
    return False
