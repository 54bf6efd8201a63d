"""Python kernels in the caller's own thread, outside of any program: for breakpoints."""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import _ext
from ...core import Aval, Value
from ..handles import CallSpec, PythonBody, handle_for
from ..types import full_layouts


_inline = contextvars.ContextVar("inline", default=False)


@contextlib.contextmanager
def inline() -> Iterator[None]:
    """Within this context, in this thread, no program is made for a Python kernel on a CPU."""
    token = _inline.set(True)
    try:
        with jax.disable_jit():
            yield
    finally:
        _inline.reset(token)


def is_inline(result_avals: Sequence[Aval]) -> bool:
    """True if a call runs inline, under `jax.disable_jit`. Calls that return random keys, not NumPy arrays, do not."""
    return _inline.get() and not any(_is_key(aval) for aval in result_avals)


def run_inline(body: PythonBody, spec: CallSpec, args: Sequence[Value]) -> Sequence[jax.Array]:
    """Call `body` on Buffers over NumPy arrays. What it raises escapes as it is."""
    arrays = [jax.random.key_data(arg) if _is_key(arg) else jnp.asarray(arg) for arg in args]
    options = spec.options
    in_orders, out_orders = _orders(options.input_layouts, arrays), _orders(options.output_layouts, spec.result_avals)
    # As they lie in memory, axes from major to minor.
    inputs = [np.asarray(np.asarray(a).transpose(o), order="C") for a, o in zip(arrays, in_orders, strict=True)]
    outputs = [np.empty([a.shape[i] for i in o], a.dtype) for a, o in zip(spec.result_avals, out_orders, strict=True)]
    for i, o in options.aliases:
        inputs[i] = outputs[o] = inputs[i].copy()  # what a kernel overwrites nobody else sees
    lent = tuple(_ext.Buffer(a, writeable=True, order=o) for a, o in zip(outputs, out_orders, strict=True))
    given = tuple(_ext.Buffer(a, writeable=False, order=o) for a, o in zip(inputs, in_orders, strict=True))
    try:
        handle_for(body).run(_ext.ExecutionContext(), lent, given)
    finally:
        for buffer in (*lent, *given):
            buffer._revoke()
    with jax.enable_x64(True):  # a result has the type that was declared
        place = _place(arrays)
        return [
            jax.device_put(a.transpose(np.argsort(o, kind="stable")), place)
            for a, o in zip(outputs, out_orders, strict=True)
        ]


def _is_key(value: object) -> bool:
    return jax.dtypes.issubdtype(getattr(value, "dtype", None), jax.dtypes.extended)


def _orders(layouts: Sequence[Any] | None, avals: Sequence[Aval]) -> Sequence[tuple[int, ...]]:
    return full_layouts(layouts, avals) or [tuple(range(aval.ndim)) for aval in avals]


def _place(arrays: Sequence[jax.Array]) -> Any:
    """Return where results are, as if a program had made them: with the operands, or nowhere in particular."""
    committed = next((array for array in arrays if array.committed), None)
    return None if committed is None or len(committed.devices()) > 1 else next(iter(committed.devices()))
