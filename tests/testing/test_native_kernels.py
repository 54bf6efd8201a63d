"""`check` of kernels in C++ that are wrong in one thing: a row that says it, and never the end of the process."""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback.debug import _checked
from eqxcallback.testing import check

from ..debug.harmful import harm, library, op
from .catching import caught_by, failures


X = jnp.arange(1.0, 6.0)


class Harm(eqxc.Layer):
    what: str = eqx.field(static=True)
    distance: int = eqx.field(static=True, default=0)
    kernels: ClassVar = {"cpu": eqxc.NativeKernel("Harm", library(), attributes=("what", "distance"))}

    def reference(self, x):
        return 2 * x


def test_a_right_one_passes():
    report = check(op("Right"), X, skip=("export", "dtypes", "hessian", "jvp", "odd shapes", "threads"))
    assert report.passed
    assert "not applicable" in str(report)


@pytest.mark.parametrize(
    ("what", "distance", "text"),
    [
        ("write after", 1, "4 bytes after its memory were overwritten, the nearest at 1"),
        ("write before", 5000, "the kernel wrote at 20000 bytes before its memory, and crashed"),
        ("read after", 20, "the kernel read at 77 bytes after its memory, and crashed"),
        ("abort", 0, "the kernel crashed (SIGABRT: Aborted)"),
        ("exit", 0, "the kernel ended the process with status 3"),
        ("throw", 0, "the kernel threw a C++ exception"),
    ],
)
def test_what_would_end_the_process(what, distance, text):
    rows = {row.name: row for row in failures(Harm(what, distance), X, only="types")}
    assert list(rows) == ["inputs untouched"]
    assert text in rows["inputs untouched"].detail
    assert "compiled: " in rows["inputs untouched"].detail


def test_a_kernel_that_never_ends(monkeypatch):
    monkeypatch.setattr(_checked, "_SECONDS", 0.2)
    (row,) = failures(harm("loop"), X, only="types")
    assert "the kernel did not end within 0.2 s" in row.detail


def test_an_input_is_changed():
    row = caught_by("inputs untouched", Harm("write input"), X)
    assert "input 0" in row.detail
    assert "was changed" in row.detail


def test_an_element_is_unwritten():
    row = caught_by("outputs written", op("LeaveLast"), X)
    assert "1 of 5 elements were never written, the first at (4,)" in row.detail


def test_attributes_are_ignored():
    ignoring = op("Right", lambda x, *, a: 2 * x)
    row = caught_by("attributes", ignoring, X, a=1)
    assert "the kernel reads none of its attributes (a)" in row.detail
    assert check(op("AllAttributes", lambda x, *, a: 2 * x), X, a=1, only="attributes").passed


def test_a_late_read():
    function = op("Neighbours", lambda x, *, is_right: x + jnp.pad(x, (1, 0))[:-1], aliases={"x": 0})
    row = caught_by("late reads", function, X, is_right=False)
    assert "read after the output in the same memory was written" in row.detail
    assert check(function, X, only="late reads", is_right=True).passed


class Late(eqxc.Layer):
    """The same in Python."""

    input_output_aliases: ClassVar = {"x": 0}

    def kernel(self, ctx, out, x):
        a, b = np.asarray(out), np.asarray(x)
        for i in range(len(a)):
            a[i] = b[i] + (b[i - 1] if i else 0)

    def reference(self, x):
        return x + jnp.pad(x, (1, 0))[:-1]


def test_a_late_read_in_python():
    assert "read after the output" in caught_by("late reads", Late(), X).detail


MULTIPLY = """
void multiply(long n, const float* x, const float* w, float* out) { for (long i = 0; i < n; ++i) out[i] = x[i] * w[i]; }
void backward(long n, const float* x, const float* w, const float* dout, float* dx, float* dw) {
  for (long i = 0; i < n; ++i) dx[i] = dout[i] * w[i], dw[i] = dout[i] * x[i];
}
"""


def test_a_backward_kernel_that_writes_gradients_that_nobody_needs():
    """They are null pointers, in no row before."""
    multiply = eqxc.Op(
        "multiply",
        kernels={"cpu": eqxc.CKernel("multiply", source=MULTIPLY, parameters=("x.size", "x", "w", "out"))},
        backward={
            "cpu": eqxc.CKernel("backward", source=MULTIPLY, parameters=("x.size", "x", "w", "dout", "dx", "dw"))
        },
        reference=lambda x, w: x * w,
        vmap_method="sequential",
    )
    rows = ("types", "grad", "partial grads", "grad of vmap")
    failed = {row.name: row for row in failures(multiply, X, X + 1, only=rows)}
    assert "partial grads" in failed
    assert "the kernel crashed (SIGSEGV" in failed["partial grads"].detail
