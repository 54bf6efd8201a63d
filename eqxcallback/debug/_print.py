"""A tap that prints."""

import reprlib
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import jax
import numpy as np

from ..core import AnyBool, AnyInt, OwnCallable, PyTree, identity
from ._layout import layout
from ._tap import Mode, tap_leaves


@runtime_checkable
class Stream(Protocol):
    """A stream that text can be written to."""

    def write(self, text: str, /) -> object: ...


_WHO = "eqxcallback.debug.print"
_lock = threading.RLock()  # a stream may be written to by what prints itself


class Printer(OwnCallable):
    """A function for taps, which prints. Equal for those that print the same to the same stream.

    !!! example

        ```python
        x = eqxcallback.debug.tap_cotangents(eqxcallback.debug.Printer({"what": "gradient"}), x)
        ```
    """

    def __init__(
        self,
        labels: Mapping[str, object] | None = None,
        *,
        output_stream: Stream | None = None,
        threshold: int | None = 1024,
    ):
        """**Arguments:** those of [`eqxcallback.debug.print`][].

        **Raises:** `TypeError` for a label that is an array or a stream, an `output_stream` without `write`, and a `threshold`
        that is not a number.
        """
        who = _WHO
        if output_stream is not None and not callable(getattr(output_stream, "write", None)):
            raise TypeError(f"{who}: expected output_stream to have a method write(text); got {output_stream!r}.")
        if threshold is not None and (not isinstance(threshold, int | np.integer) or isinstance(threshold, bool)):
            raise TypeError(f"{who}: expected threshold to be a number of elements, or None; got {threshold!r}.")
        self._write = None if output_stream is None else output_stream.write
        self._threshold = threshold
        self._labels = {name: _label(name, value) for name, value in (labels or {}).items()}

    def _named_like(self) -> str:
        return _WHO

    def _identity(self) -> object:
        labels = tuple(sorted(self._labels.items()))
        return Printer, None if self._write is None else identity(self._write), self._threshold, labels

    def __call__(
        self, x: PyTree, transforms: Sequence[tuple[str, Mapping[str, object]]], device: object = None
    ) -> None:
        labels = dict(self._labels)
        if transforms:
            labels["transforms"] = str([(name, params) if params else name for name, params in transforms])
        if device is not None:
            labels["device"] = str(device)
        lines = [" ".join(f"{name}: {text}" for name, text in sorted(labels.items()))] if labels else []
        lines.append(layout(x, self._threshold))
        write = self._write or sys.stdout.write  # it may have been replaced since
        with _lock:
            for line in lines:
                write(line + "\n")


def _label(name: str, value: object) -> str:
    if any(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(value)):  # tracers are arrays too
        raise TypeError(
            f"{_WHO}: expected the label {name} to be static, as text and numbers are; got {reprlib.repr(value)} of "
            f"type {type(value).__name__}. Put arrays into the tree: debug.print({{{name!r}: {name}}})."
        )
    if callable(getattr(value, "write", None)):
        raise TypeError(
            f"{_WHO}: expected the label {name} to be static, as text and numbers are; got {value!r}, a stream. Pass it as "
            "output_stream."
        )
    return str(value)


def print(
    x: PyTree,
    /,
    *others: PyTree,
    what: object = None,
    result: PyTree = None,
    with_device: AnyBool = False,
    device_index: AnyInt | None = None,
    ordered: AnyBool = False,
    mode: Mode = "sync",
    output_stream: Stream | None = None,
    threshold: int | None = 1024,
    **labels: object,
) -> PyTree:
    """[`eqxcallback.debug.tap`][] with a function that prints `x`.

    !!! example

        ```python
        y = eqxcallback.debug.print(layer(x), what="output", step=3)
        # step: 3 what: output
        # [0.1 0.2 0.7]
        ```

    First come the labels, if there are any, in the order of their names; then the value: `( a b )` for a tuple, `[ a b ]` for a
    list, `{ k=v }` for a dict, and arrays as `np.array2string` has them. Lines are written whole, and those of one value
    together, whichever thread prints.

    **Arguments:**

    - `x`: the value, one PyTree of arrays. There are no `others`, and no format: this is not `jax.debug.print`.
    - `what`, `labels`: what to print before, which is made text when the program is traced. Arrays belong into `x`.
    - `with_device`: whether `device` is one of the labels. `transforms` is one wherever there are any.
    - `output_stream`: something with a method `write`, in place of `sys.stdout`. It is called once for each of the two.
    - `threshold`: the number of elements above which the middle of an array is left out. `None` for NumPy's own.
    - `result`, `device_index`, `ordered`, `mode`: those of [`eqxcallback.debug.tap`][].

    **Returns:** `x`, or `result`.

    **Raises:** `TypeError` for a text as `x`, for several values, for a label that is an array, and for other wrong options.
    """
    if others or isinstance(x, str):
        got = f"the text {x!r}" if isinstance(x, str) else "several values"
        raise TypeError(
            f"{_WHO}: expected one value to print, a PyTree of arrays; got {got}. This is not jax.debug.print: write "
            "debug.print(value, what='loss'), or debug.print({'loss': loss, 'x': x}) for several values."
        )
    if what is not None:
        labels["what"] = what
    printer = Printer(labels, output_stream=output_stream, threshold=threshold)
    tapped = tap_leaves("print", "values", printer, x, with_device, device_index, ordered, mode)
    return tapped if result is None else result
