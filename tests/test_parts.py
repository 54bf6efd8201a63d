"""Parts of the tests: together they have every row."""

import argparse
import dataclasses
import types

import pytest

from . import cuda12, parts


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


COMPILED_CODE = ("compilers", "any_jax_version", "compiled_code")


@dataclasses.dataclass(frozen=True)
class Item:
    """A row of a test, as pytest gives it."""

    nodeid: str
    marks: tuple[str, ...]

    def get_closest_marker(self, name):
        return True if name in self.marks else None


@pytest.fixture
def chosen(monkeypatch):
    """A function that returns the rows that a machine runs after a commit, and what the run says about them first."""

    def chosen(turn, is_twin, marks=COMPILED_CODE, rows=ROWS, **asked):
        monkeypatch.setenv("EQXCALLBACK_TESTS_TURN", str(turn))
        monkeypatch.setattr(cuda12, "IS_TWIN", is_twin)
        options = {
            "part": parts.Part((4 if is_twin else 0,), 6),
            "no_row_else": False,
            "whole": None,
            "compiled_code": None,
        }
        options |= asked
        config = types.SimpleNamespace(
            getoption=lambda name: options[name.removeprefix("--").replace("-", "_")],
            hook=types.SimpleNamespace(pytest_deselected=lambda items: None),
        )
        items = [Item(row, marks) for row in rows]
        parts.pytest_collection_modifyitems(config, items)
        return {item.nodeid for item in items}, parts.pytest_report_header(config)

    return chosen


@pytest.mark.parametrize("is_twin", [True, False])
def test_each_row_of_compiled_code_runs_on_each_machine_at_times(is_twin, chosen):
    turns = [chosen(turn, is_twin)[0] for turn in range(3)]
    assert sorted(row for rows in turns for row in rows) == sorted(ROWS)


@pytest.mark.parametrize("turn", range(3))
def test_the_machines_of_one_commit_have_other_rows_of_compiled_code(turn, chosen):
    assert not chosen(turn, True)[0] & chosen(turn, False)[0]


def test_the_same_rows_of_compiled_code_again(chosen):
    rows, said = chosen(1, True)
    assert said == "compiled code: --compiled-code 2/3"
    for is_twin in (True, False):
        assert chosen(0, is_twin, compiled_code=parts.parse(said.partition("--compiled-code ")[2])) == (rows, said)
    assert chosen(2, False, compiled_code=parts.parse("0/1"))[0] == set(ROWS)


def test_the_twin_has_all_rows_unless_a_part_is_asked_for(chosen):
    assert chosen(1, True, part=None) == (set(ROWS), "compiled code: all rows")
    assert chosen(1, True, marks=("compilers", "any_jax_version"))[0] == set(ROWS)
    # Any row of compiled code can be named by itself.
    for row in ROWS:
        assert chosen(1, False, rows=[row], part=None)[0] == {row}


def test_a_commit_chooses_one_of_three(monkeypatch):
    said = types.SimpleNamespace(stdout="a13f9477\n")
    monkeypatch.setattr(parts.subprocess, "run", lambda *_, **__: said)
    assert parts._turn() == str(0xA13F9477 % 3)

    def no_git(*_, **__):
        raise FileNotFoundError("git")

    monkeypatch.setattr(parts.subprocess, "run", no_git)
    assert parts._turn() == "0"
