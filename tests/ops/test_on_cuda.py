"""docs/gpus.md says what runs on a GPU, as it is."""

import inspect
import pathlib

from eqxcallback import ops

from . import on_cuda


PAGE = pathlib.Path(__file__).parents[2] / "docs" / "gpus.md"


def test_the_page_is_up_to_date():
    table = on_cuda.of_page(PAGE.read_text())
    assert table == on_cuda.table(), "python -m tests.ops.on_cuda prints it"


def test_no_definition_runs_on_a_gpu():
    assert "definition" not in on_cuda.table()


def test_every_op_is_there():
    takes_an_implementation = {
        name
        for name, function in vars(ops).items()
        if inspect.isfunction(function) and {"implementation", "options"} & set(inspect.signature(function).parameters)
    }
    assert {op for op, *_ in on_cuda.calls()} == takes_an_implementation
