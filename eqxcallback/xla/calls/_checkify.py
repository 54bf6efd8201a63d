"""The rules of `jax.experimental.checkify`: what a kernel returns is looked at as what XLA computes."""

import functools
from typing import Any

# `jax._src.checkify.error_checks`: the rules of primitives, which have no public name. Without one no NaN of a kernel is found.
# Noticed by: tests/transform/test_checkify.py.
from jax._src import checkify as _checkify

from ._op_call import OpCall, op_call_p
from ._python_call import effectful_call_p, python_call_p


class _Named:
    """The primitive under the name of the op, which the error tells."""

    multiple_results = True
    bind = staticmethod(op_call_p.bind)

    def __init__(self, name: str):
        self.name = name


def _of_op(*args: Any, call: OpCall) -> Any:
    primitive: Any = _Named(repr(call).partition("(")[0])
    return _checkify.nan_error_check(primitive, *args, call=call)


def register() -> None:
    _checkify.error_checks[op_call_p] = _of_op
    for primitive in (python_call_p, effectful_call_p):
        _checkify.error_checks[primitive] = functools.partial(_checkify.nan_error_check, primitive)
