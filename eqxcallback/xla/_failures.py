"""The text of a failing callback, which C++ hands to XLA."""

from collections.abc import Sequence
from typing import Any

from .. import _errors, _ext
from ._body import PythonBody


def _describe(outputs: Sequence[_ext.Buffer], inputs: Sequence[_ext.Buffer]) -> str:
    def types(buffers: Sequence[_ext.Buffer]) -> str:
        return ", ".join(_errors.type_text(b.dtype, b.shape) for b in buffers)

    return f"({types(inputs)}) -> ({types(outputs)})"


def _on_failure(
    error: BaseException, body: Any, outputs: Sequence[_ext.Buffer], inputs: Sequence[_ext.Buffer], name_stack: str
) -> str:
    if isinstance(body, PythonBody):
        body = body.callback
        # Its own frame, PythonBody.__call__, is the first one: the user's start after it.
        if error.__traceback__ is not None:
            error = error.with_traceback(error.__traceback__.tb_next or error.__traceback__)
    return _errors.record_failure(error, _errors.callable_name(body), name_stack, _describe(outputs, inputs))


def register() -> None:
    _ext.on_failure(_on_failure)
