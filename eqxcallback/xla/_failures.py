"""The text of a failing callback, which C++ hands to XLA."""

from collections.abc import Sequence
from typing import Any

from .. import _errors, _ext
from ._body import PythonBody


def _on_failure(
    error: BaseException, body: Any, outputs: Sequence[_ext.Buffer], inputs: Sequence[_ext.Buffer], name_stack: str
) -> str:
    operands = _errors.types_text(outputs, inputs)
    error = _errors.from_the_user(error)
    if isinstance(body, str):  # a native kernel, which checked mode has found fault with
        return _errors.record_failure(error, body, name_stack, operands, lane="native")
    name = _errors.callable_name(body.callback if isinstance(body, PythonBody) else body)
    return _errors.record_failure(error, name, name_stack, operands)


def register() -> None:
    _ext.on_failure(_on_failure)
