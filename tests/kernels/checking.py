"""The result of a reference in JAX, and how close a kernel has to come."""

import functools
import math
from typing import Any

import jax
import numpy as np

from ..ops.families import by_op, tagged
from ..ops.table import Row, quickly_compiled, wide
from .kernels import BF16, F16


SEEDS = [0, 1, 2]
ROWS: dict[str, list[Row]] = by_op(tagged("cuda"))


@functools.cache
def _pullback(function: Any) -> Any:
    def pulled(cotangent: Any, *args: Any) -> Any:
        return jax.vjp(function, *args)[1](cotangent)

    return quickly_compiled(pulled)


def want(function: Any, *args: Any) -> Any:
    """Return the result of the same values in f32. `function` is one object for all calls, to be compiled once for each shape."""
    return np.asarray(quickly_compiled(function)(*map(wide, args)))


def want_gradients(function: Any, cotangent: Any, *args: Any) -> list[Any]:
    return [np.asarray(x) for x in _pullback(function)(wide(cotangent), *map(wide, args))]


def check(got: Any, expected: Any, terms: int, scale: float | None = None) -> None:
    """As close as the order of sums of so many `terms` allows, and NaN and infinities at the same places."""
    precision = {F16: 2.0**-10, BF16: 2.0**-7}.get(got.dtype, 2.0**-19)
    with np.errstate(over="ignore"):  # f32 may be too large for f16
        expected = np.asarray(expected).astype(got.dtype).astype(np.float32)
    if scale is None:
        scale = max(1.0, float(np.max(np.abs(expected), initial=0, where=np.isfinite(expected))))
    atol = 2.0**-20 * math.sqrt(terms + 1) * scale
    np.testing.assert_allclose(got.astype(np.float32), expected, rtol=precision, atol=atol)
