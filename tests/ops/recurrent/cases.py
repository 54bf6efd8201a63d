"""The gates of cells: operands, and which tests take which."""

import functools
from typing import Any

import jax.numpy as jnp

from eqxcallback import ops
from eqxcallback.ops.recurrent import _reference as reference

from ..table import BATCHES, Case, floats, normal, python, row, rows


def lstm_gates(dtype: Any, shape: Any) -> Case:
    *batch, size = shape
    args = (normal(1, (*batch, 4 * size), dtype, 2.0), normal(2, shape, dtype))
    return Case(_joined(ops.lstm_gates), _joined(reference.lstm_gates), args, 1)


def gru_gates(dtype: Any, shape: Any, bias: bool = True) -> Case:
    *batch, size = shape
    inputs, of_hidden = (normal(seed, (*batch, 3 * size), dtype, 2.0) for seed in (1, 2))
    args = (inputs, of_hidden, normal(3, shape, dtype), *([normal(4, (size,))] if bias else []))
    return Case(ops.gru_gates, reference.gru_gates, args, 1)


@functools.cache
def _joined(function: Any) -> Any:
    """Both results as one array."""
    return lambda *args: jnp.concatenate(function(*args), axis=-1)


# Odd, of whole packs, of several warps, and more rows than threads of a part.
_CUDA = [((1, 1),), ((3, 7),), ((19, 40),), ((2, 264),), ((2, 1001),), ((1, 9001),), ((300, 8),)]

CASES = [
    *[
        row(make, shape, tags=["edge"])
        for make in (lstm_gates, gru_gates)
        for shape in ((17,), (3, 1), (2, 3, 16), (0, 3))
    ],
    *[row(make, *shape, tags=["cuda"]) for make in (lstm_gates, gru_gates) for shape in _CUDA],
    row(gru_gates, (5, 64), False, tags=["cuda"]),
    *[row(make, (512, 2048), tags=["model"]) for make in (lstm_gates, gru_gates)],
    *rows(lstm_gates, [((*batch, 17),) for batch in BATCHES] + [((2, 1),), ((3, 64),)], "gradient"),
    *rows(gru_gates, [((*batch, 17),) for batch in BATCHES] + [((2, 1),), ((3, 64), False)], "gradient"),
    *rows(lstm_gates, [((301, 302),)], "large gradient"),
    *rows(gru_gates, [((301, 302),)], "large gradient"),
    row(lstm_gates, (2, 5), tags=("mapped", "derived"), name="lstm_gates"),
    row(gru_gates, (2, 5), tags=("mapped", "derived"), name="gru_gates"),
    row(gru_gates, (2, 5), False, tags=("mapped", "derived"), name="gru_gates without bias"),
    python("lstm_gates", ops.lstm_gates, lambda d: floats(d, (2, 12), (2, 3)), "python mapped"),
    python("gru_gates", ops.gru_gates, lambda d: floats(d, (2, 9), (2, 9), (2, 3), (3,)), "python mapped"),
    python("gru_gates plain", ops.gru_gates, lambda d: floats(d, (9,), (9,), (3,)), "python mapped"),
]
