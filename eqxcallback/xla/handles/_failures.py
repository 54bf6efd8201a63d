"""The text of a failing callback, which C++ hands to XLA; and the failure of one that has not written its outputs."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ... import _ext
from ...core import (
    OwnCallable,
    callable_name,
    from_the_user,
    keep_native,
    record_failure,
    record_native_error,
    type_text,
    types_text,
)
from ._body import PythonBody


def _on_failure(
    error: BaseException, body: Any, outputs: Sequence[_ext.Buffer], inputs: Sequence[_ext.Buffer], name_stack: str
) -> str:
    operands = types_text(outputs, inputs)
    error = from_the_user(error)
    if isinstance(body, str):  # a native kernel, which checked mode has found fault with
        lane = f"native lane, {operands}"
        layer, _, is_of_the_user = body.partition("[native]")
        text = (
            f"{body}: {error}\n{lane}" if is_of_the_user else f"{body} failed; {lane}\n{type(error).__name__}: {error}"
        )
        return keep_native(error.with_traceback(None), layer, text, operands)
    return record_failure(error, callable_name(_callable(body)), name_stack, operands)


def _on_unwritten(
    body: Any,
    outputs: Sequence[_ext.Buffer],
    inputs: Sequence[_ext.Buffer],
    unwritten: Sequence[tuple[int, int]],
) -> RuntimeError | None:
    """`unwritten` has the indices of outputs, and the seeds of the noise that is left in them. Returns what the call raises."""
    function = _callable(body)
    gradients = function._gradients() if isinstance(function, OwnCallable) else None
    if gradients is None:
        who, names = callable_name(function), {i: f"output {i}" for i, _ in unwritten}
        remedy = (
            "Results are what a kernel writes into `out`: `out[...] = value` writes, and `out = value` only gives the name to "
            "something else. Write every element, in every call."
        )
    else:
        who, names = gradients
        remedy = "Write each Buffer in grads, as in `grads[0][...] = value`, and every element of it."
    faults = [
        f"{names[i]}, {type_text(outputs[i].dtype, outputs[i].shape)}: {unwritten_text(outputs[i], outputs[i]._left(seed)[0])}"
        for i, seed in unwritten
    ]
    error = RuntimeError(f"{who}: {'; '.join(faults)}. {remedy}")
    return None if isinstance(function, OwnCallable) and function._takes(error, outputs, inputs) else error


def unwritten_text(buffer: _ext.Buffer, mask: np.ndarray) -> str:
    """`mask` says of each element, as they lie in memory, whether it was left."""
    strides = [stride // buffer.dtype.itemsize for stride in buffer.strides]
    as_laid_out = np.lib.stride_tricks.as_strided(mask, buffer.shape, strides)
    first = tuple(int(i) for i in np.argwhere(as_laid_out)[0])
    return f"{int(mask.sum())} of {buffer.size} elements were never written, the first at {first}"


def _callable(body: Any) -> Any:
    return body.callback if isinstance(body, PythonBody) else body


def register() -> None:
    _ext.on_failure(_on_failure)
    _ext.on_native_error(record_native_error)
    _ext.on_unwritten(_on_unwritten)
