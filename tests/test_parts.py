"""Parts of the tests: together they have every row."""

import argparse

import pytest

from . import parts


ROWS = [
    f"tests/test_it.py::test_it[{size}-{dtype}]" for size in range(7) for dtype in ("float32", "bfloat16", "float16")
]


def test_a_row_that_runs_once_is_in_one_part():
    chosen = [parts.rows_of(parts.Part((i,), 3), ROWS, once=True) for i in range(3)]
    assert sorted(row for of in chosen for row in of) == sorted(ROWS)
    assert parts.rows_of(parts.Part((1, 2), 3), ROWS, once=True) == chosen[1] | chosen[2]


def test_no_part_is_one_parameter():
    for i in range(3):
        chosen = parts.rows_of(parts.Part((i,), 3), ROWS, once=True)
        assert len({row.rpartition("-")[2] for row in chosen}) == 3


@pytest.mark.parametrize("count", [1, 2, 21])
def test_each_part_has_a_row(count):
    chosen = [parts.rows_of(parts.Part((i,), 6), ROWS[:count], once=False) for i in range(6)]
    assert all(chosen)
    assert set().union(*chosen) == set(ROWS[:count])


def test_a_row_stays_in_its_part():
    part = parts.Part((0,), 3)
    assert parts.rows_of(part, ROWS[:10], once=True) == parts.rows_of(part, ROWS, once=True) & set(ROWS[:10])


@pytest.mark.parametrize("text", ["3/3", "1,5/3", "-1/3"])
def test_a_part_that_there_is_not(text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"0 <= I < N, got {text}"):
        parts.parse(text)


def test_text():
    assert parts.parse("0/3") == parts.Part((0,), 3)
    assert parts.parse("1,2/6") == parts.Part((1, 2), 6)
