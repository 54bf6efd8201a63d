"""Errors of handlers in C++ as exceptions: they have a code and a text, and no frames."""

import collections
import re
import threading

from jax.errors import JaxRuntimeError

from ._errors import FIRST_LINE, KernelError, keep_failure


# Codes of `XLA_FFI_Error_Code` that are another exception than a `RuntimeError`.
_INVALID_ARGUMENT = 3

_lock = threading.Lock()
# Nobody asks for the errors of calls that did not wait, so only so many are kept.
_last: collections.deque[tuple[int, KernelError]] = collections.deque(maxlen=64)


class InvalidArgument(KernelError, ValueError):
    """The `KernelError` of a handler that says that an argument is invalid."""


def record_native_error(ops: str, symbol: str, code: int, message: str, operands: str) -> str:
    """Log the error of the handler `symbol`, keep it for whoever calls it, and return its text for XLA."""
    # Handlers of this package name the op themselves, and have no symbol here.
    text = f"{ops}[native]: kernel {symbol}: {message}{_remedy(message)}" if symbol else message
    layer = ops or message.partition("[")[0]
    is_invalid = code == _INVALID_ARGUMENT
    original = ValueError(message) if is_invalid else RuntimeError(message)
    kind = InvalidArgument if is_invalid else KernelError
    return keep_native(original, layer, f"{text}\nnative lane, {operands}", operands, kind)


def _remedy(message: str) -> str:
    """Say what to do about an error of XLA's that does not say it itself."""
    counts = re.search(r"Wrong number of attributes: expected (\d+) but got (\d+)", message)
    if counts is None or int(counts[1]) <= int(counts[2]):
        return ""
    return (
        ". A layer's static fields are passed only if they are named, NativeKernel(..., attributes=('k',)), and an Op's options "
        "only if the call states them."
    )


def keep_native(
    original: BaseException, layer: str, text: str, operands: str, kind: type[KernelError] = KernelError
) -> str:
    """The same for any exception, and any text."""
    first, *rest = text.split("\n")

    def numbered(number: int) -> str:
        return "\n".join([f"{first} [failure {number}]", *rest])

    number, error = keep_failure(numbered, kind, layer=layer, name_stack="", operands=operands, original=original)
    with _lock:
        _last.append((number, error))
    return str(error)


def reraise_native(error: Exception, op: str | None) -> None:
    """Raise the `KernelError` behind the error that XLA made of its text, if it is one of a native kernel. A handler does not
    know which of its ops it was called for: here it is `op`.
    """
    match = FIRST_LINE.match(str(error)) if type(error) in (JaxRuntimeError, ValueError) else None
    if match is None:
        return
    with _lock:
        failures = [failure for number, failure in _last if number == int(match[1])]
    if not failures:
        return
    (kept,) = failures
    _, is_of_the_user, rest = str(kept).partition("[native]: kernel ")
    layer, text = (op, f"{op}{is_of_the_user}{rest}") if op and is_of_the_user else (kept.layer, str(kept))
    # Another one than is kept: as it is raised, it gets a traceback, and that holds arrays.
    raise type(kept)(
        text, layer=layer, name_stack=kept.name_stack, operands=kept.operands, original=kept.original
    ) from kept.original
