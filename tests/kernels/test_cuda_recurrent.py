"""The gates of recurrent cells, forward and backward, on a CPU."""

import itertools
from typing import Any

import numpy as np
import pytest

from ..ops.recurrent.cases import gru_gates, lstm_gates
from ..ops.table import DTYPES, normal
from . import kernels
from .checking import ROWS, SEEDS, check, want_gradients
from .kernels import F32, results


CELLS = {"lstm_gates": lstm_gates, "gru_gates": gru_gates}
by_row = pytest.mark.parametrize("row", [row for op in CELLS for row in ROWS[op]], ids=str)
by_cell = pytest.mark.parametrize("op", CELLS)


def forward(op, args) -> kernels.Call:
    if op == "lstm_gates":
        return kernels.lstm_gates(*args)
    inputs, of_hidden, hidden, *bias = args
    return kernels.gru_gates(inputs, of_hidden, hidden, *(bias or [None]))


def backward(op, args, dout, *, needed: Any = kernels.ALL) -> kernels.Call:
    """The results are not read. An LSTM has two, side by side in `dout`."""
    if op == "lstm_gates":
        gates, cell = args
        nothing = np.full_like(cell, np.nan)
        both = np.split(dout, 2, axis=-1)
        return kernels.lstm_gates_backward(gates, cell, [nothing] * 2, both, needed=needed)
    inputs, of_hidden, hidden, *bias = args
    every = inputs, of_hidden, hidden, *(bias or [None])
    return kernels.gru_gates_backward(every, np.full_like(hidden, np.nan), dout, needed=needed)


def upstream(op, args):
    *batch, size = args[1 if op == "lstm_gates" else 2].shape
    return normal(9, (*batch, 2 * size if op == "lstm_gates" else size), args[0].dtype)


def check_gradients(got, expected, rows, needed: Any = kernels.ALL):
    for i, gradient in enumerate(got):
        if i >= len(expected) or i not in needed:
            assert gradient is None
        else:
            check(gradient, expected[i], rows)


@by_row
def test_forward(row):
    for dtype in DTYPES:
        case, expected = row.wanted(dtype)
        got = results(forward(row.make.__name__, case.args), seed=3)
        check(np.concatenate(got, axis=-1), expected, case.terms)


@by_row
def test_backward(row):
    for dtype in DTYPES:
        case, op = row(dtype), row.make.__name__
        dout = upstream(op, case.args)
        expected = want_gradients(case.reference, dout, *case.args)
        check_gradients(results(backward(op, case.args, dout)), expected, len(dout))


@by_cell
@pytest.mark.parametrize("shape", [(19, 40), (3, 257)], ids=str)
def test_gradients_that_are_not_needed(shape, op):
    """Each set of them. Without that of a bias, there is no second launch."""
    case = CELLS[op](F32, shape)
    dout = upstream(op, case.args)
    expected = want_gradients(case.reference, dout, *case.args)
    for count in range(1, len(case.args)):
        for needed in itertools.combinations(range(len(case.args)), count):
            call = backward(op, case.args, dout, needed=needed)
            assert len(call.launches) == 1 + (3 in needed)
            for options in ({}, {"misaligned": True}):
                check_gradients(results(call, **options), expected, shape[0], needed)


@by_cell
def test_any_alignment_and_grid(op):
    for dtype in DTYPES:
        case = CELLS[op](dtype, (9, 264))
        dout = upstream(op, case.args)
        for call in (forward(op, case.args), kernels.with_one_block(forward(op, case.args))):
            check(np.concatenate(results(call, misaligned=True), axis=-1), case.want(), 1)
        expected = want_gradients(case.reference, dout, *case.args)
        check_gradients(results(backward(op, case.args, dout), misaligned=True), expected, 9)


@by_cell
def test_the_order_of_threads_does_not_matter(op):
    args = CELLS[op](F32, (70, 100)).args
    for call in (forward(op, args), backward(op, args, upstream(op, args))):
        first, *others = ([x.tobytes() for x in results(call, seed)] for seed in SEEDS)
        for other in others:
            assert first == other


@by_cell
def test_nothing(op):
    for shape in ((0, 40), (3, 0)):
        args = CELLS[op](F32, shape).args
        assert results(forward(op, args))[0].shape == shape
        got = results(backward(op, args, upstream(op, args)))
        assert [x.shape for x in got] == [x.shape for x in args]
        if op == "gru_gates":
            np.testing.assert_array_equal(got[3], np.zeros(shape[1:]))


@by_cell
def test_values_at_the_edges(op):
    """Gates that are all open or all closed, NaN, and infinite."""
    for dtype in DTYPES:
        case = CELLS[op](dtype, (7, 16))
        first = case.args[0]
        first[0], first[1], first[2] = 100, -100, 6e4
        first[3], first[4] = -6e4, np.nan
        first[5], first[6] = np.inf, -np.inf
        check(np.concatenate(results(forward(op, case.args)), axis=-1), case.want(), 1)
        dout = upstream(op, case.args)
        expected = want_gradients(case.reference, dout, *case.args)
        check_gradients(results(backward(op, case.args, dout)), expected, 7)


def calls(dtype):
    for shape in ((3, 7), (5, 64), (300, 8)):
        for op, cell in CELLS.items():
            args = cell(dtype, shape).args
            yield forward(op, args)
            for needed in ([0], [1], kernels.ALL):
                yield backward(op, args, upstream(op, args), needed=needed)
