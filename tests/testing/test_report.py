"""The table, the error, and the options of `check`."""

import math
from typing import Any, cast

import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback.testing import CheckFailed, Report, check

from ..layers import Scale
from .layers import scale


class Twice(Scale):
    def kernel(self, ctx, out, x):
        super().kernel(ctx, out, x)
        np.asarray(out)[...] *= np.asarray(2, out.dtype)


SOME = ("types", "reference", "aliasing", "vmap")


def test_the_table():
    report = check(*scale(), only=SOME)
    assert isinstance(report, Report)
    subject, empty, *table = str(report).splitlines()
    assert subject == "Scale of self.weight: float32[3], args[0]: float32[3]"
    assert empty == ""
    assert table[0].split() == ["check", "result", "worst", "error", "time"]
    assert set(table[1]) == {"-"}
    assert [line.split()[0] for line in table[2:]] == list(SOME)
    assert table[3].split()[:3] == ["reference", "ok", "0.0e+00"]
    assert table[4].endswith("nothing is overwritten")
    columns = table[0].index("result")
    assert all(line[columns - 1] == " " and line[columns] != " " for line in table[2:])


def test_rows():
    report = check(*scale(), only=SOME)
    assert report.passed
    assert report.failed == ()
    assert [row.name for row in report.rows] == list(SOME)
    row = report["reference"]
    assert (row.result, row.detail) == ("ok", "")
    assert row.worst_error == 0
    assert row.seconds > 0
    assert report["types"].worst_error is None
    with pytest.raises(KeyError, match="there is no row 'grads'; there are types, "):
        report["grads"]


def test_the_error():
    with pytest.raises(CheckFailed) as caught:
        check(*scale(Twice), only=SOME)
    error = caught.value
    assert isinstance(error, AssertionError)
    assert [row.name for row in error.report.failed] == ["reference", "vmap"]
    text = str(error)
    assert text.startswith("failed: reference, vmap\n\nTwice of self.weight")
    assert str(error.report) in text
    assert "reference:\n    the example: 3 of 3 elements differ, most at (2,): got" in text
    assert max(map(len, text.splitlines())) <= 110


def test_long_details_are_cut():
    class Long(Scale):
        def kernel(self, ctx, out, x):
            raise ValueError("much " * 1000)

    with pytest.raises(CheckFailed) as caught:
        check(*scale(Long), only=("types", "vmap"))
    assert max(map(len, str(caught.value).splitlines())) <= 110
    assert len(str(caught.value).splitlines()) < 40


def test_only_and_skip():
    assert [row.name for row in check(*scale(), only="jit").rows] == ["jit"]
    assert [row.name for row in check(*scale(), only=SOME, skip=("vmap", "types")).rows] == ["reference", "aliasing"]
    assert [row.name for row in check(*scale(), only=SOME[::-1], skip="vmap").rows] == list(SOME[:3])
    with pytest.raises(ValueError, match=r"there is no row 'grads'. The rows are types, inputs untouched, "):
        check(*scale(), only="grads")
    with pytest.raises(ValueError, match=r"there is no row 'grads'"):
        check(*scale(), skip=("jit", "grads"))


def test_tolerances():
    class Nearly(Scale):
        def kernel(self, ctx, out, x):
            super().kernel(ctx, out, x)
            np.asarray(out)[...] *= np.asarray(1.01, out.dtype)

    rows = ("reference", "vmap", "odd shapes")
    check(*scale(Nearly), only=rows, rtol=0.05)
    check(*scale(Nearly), only=rows, atol=0.05)
    with pytest.raises(CheckFailed):
        check(*scale(Nearly), only=rows, rtol=1e-3)
    with pytest.raises(CheckFailed):
        check(*scale(Nearly), only=rows)


def test_seed():
    first, second, other = (
        check(*scale(), only="finite differences", seed=seed).rows[0].worst_error for seed in (0, 0, 1)
    )
    assert first == second != other


def test_what_cannot_be_checked():
    with pytest.raises(TypeError, match=r"expected a layer, an op or a function; got 3 of type int"):
        check(cast(Any, 3))
    with pytest.raises(TypeError, match=r"expected a layer, not its class; got Scale. Make an instance"):
        check(Scale)


def test_public_names():
    public = {name for name in vars(eqxc.testing) if not name.startswith("_")}
    assert public - {"jaxtyping"} == {  # which its import hook adds
        "check",
        "emulated",
        "CheckFailed",
        "Report",
    }


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"rtol": math.nan}, ValueError, "expected rtol to be a number from 0 up, or None; got nan"),
        ({"atol": -1.0}, ValueError, "expected atol to be a number from 0 up, or None; got -1.0"),
        ({"rtol": "small"}, ValueError, "expected rtol to be a number from 0 up, or None; got 'small'"),
        ({"seed": -1}, ValueError, "expected seed to be an integer from 0 up; got -1"),
        ({"seed": "a"}, ValueError, "expected seed to be an integer from 0 up; got 'a'"),
        ({"capture": "yes"}, TypeError, "expected capture to be True or False; got 'yes' of type str"),
        ({"progress": "no"}, TypeError, "expected progress to be True or False; got 'no' of type str"),
        ({"only": 3}, TypeError, "expected only to have names of rows; got 3 of type int"),
        ({"only": ()}, ValueError, "only and skip leave no row to run"),
        ({"only": "jit", "skip": ("jit",)}, ValueError, "only and skip leave no row to run"),
    ],
    ids=str,
)
def test_wrong_options(options, kind, message):
    with pytest.raises(kind, match=f"testing.check: {message}"):
        check(*scale(), **options)
