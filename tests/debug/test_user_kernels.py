"""Checked mode of kernels in C++ that are the user's: in a child process, whatever they do."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback.debug import _checked

from .harmful import harm, op


X = jnp.arange(1.0, 6.0)


def in_checked_mode(function, *args, jit=False):
    """Eager calls raise what they find by themselves."""
    with eqxc.debug.checked(), eqxc.raising() if jit else contextlib.nullcontext():
        return jax.block_until_ready((jax.jit(function) if jit else function)(*args))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("what", "distance", "text"),
    [
        ("write after", 1, r"output 0 \(.*\): 4 bytes after its memory were overwritten, the nearest at 1$"),
        ("write after", 3, r"output 0 .*: 4 bytes after its memory were overwritten, the nearest at 9$"),
        ("write before", 2, r"output 0 .*: 4 bytes before its memory were overwritten, the nearest at 5$"),
        ("write after", 500, r"output 0 .*: the kernel wrote at 1997 bytes after its memory, and crashed$"),
        ("write before", 5000, r"output 0 .*: the kernel wrote at 20000 bytes before its memory, and crashed$"),
        ("read after", 20, r"input 0 .*: the kernel read at 77 bytes after its memory, and crashed$"),
        ("write input", 0, r"input 0 .* was changed$"),
        ("abort", 0, r"the kernel crashed \(SIGABRT: Aborted\)$"),
        ("null", 0, r"the kernel crashed \(SIGSEGV: .* at the address 0x8, which is none of its operands\)$"),
        ("exit", 0, r"the kernel ended the process with status 3$"),
        ("throw", 0, r"the kernel threw a C\+\+ exception: out of luck$"),
    ],
)
def test_what_is_wrong(what, distance, text, jit):
    with pytest.raises(eqxc.KernelError) as caught:
        in_checked_mode(harm(what, distance), X, jit=jit)
    first = str(caught.value.original).partition("checked mode found: ")[2]
    assert re.search(text, first), first
    assert str(caught.value).count("kernel Harm") == 1
    if not jit:
        assert str(caught.value).startswith("mine[native]: kernel Harm: checked mode found: ")
        assert caught.value.layer == "mine"
    assert caught.value.operands == "(float32[5]) -> (float32[5])"


def test_a_kernel_that_never_ends(monkeypatch):
    monkeypatch.setattr(_checked, "_SECONDS", 0.3)
    with pytest.raises(
        eqxc.KernelError, match=r"the kernel did not end within 0\.3 s\. In checked mode it runs in a process"
    ):
        in_checked_mode(harm("loop"), X)


def test_an_unwritten_element():
    with pytest.raises(eqxc.KernelError, match=r"output 0 .*: 1 of 5 elements were never written, the first at \(4,\)"):
        in_checked_mode(op("LeaveLast"), X)


@pytest.mark.parametrize("size", [0, 1, 16, 5000])
def test_right_kernels_pass(size):
    x = jnp.arange(float(size))
    for function in (harm("nothing"), harm("thread"), op("Right"), op("Pooled"), op("OpenMp"), op("Later")):
        for _ in range(2):  # outside of checked mode as well: then this process has threads that the next child lacks
            np.testing.assert_array_equal(in_checked_mode(function, x), 2 * x)
            np.testing.assert_array_equal(function(x), 2 * x)


def test_attributes_that_nobody_reads():
    """The handler binds none, so XLA ignores what it is given."""
    given = op("Right", lambda x, *, a, b: 2 * x)
    np.testing.assert_array_equal(given(X, a=1, b=2), 2 * X)
    with pytest.raises(
        eqxc.KernelError, match=r"the kernel reads none of its attributes \(a, b\)\. Bind them in the handler"
    ):
        in_checked_mode(lambda x: given(x, a=1, b=2), X)
    named = op("Right", lambda x, *, a, b: 2 * x, attributes=())
    np.testing.assert_array_equal(in_checked_mode(lambda x: named(x, a=1, b=2), X), 2 * X)


def test_attributes_that_a_dictionary_has():
    given = op("AllAttributes", lambda x, *, a: 2 * x)
    for _ in range(2):
        np.testing.assert_array_equal(in_checked_mode(lambda x: given(x, a=1), X), 2 * X)


def test_a_kernel_is_called_where_its_outputs_are():
    """Only `testing.check` looks for a kernel that reads what it has overwritten."""
    function = op("Neighbours", lambda x, *, is_right: x + jnp.pad(x, (1, 0))[:-1], aliases={"x": 0})
    want = X + jnp.pad(X, (1, 0))[:-1]
    np.testing.assert_array_equal(in_checked_mode(lambda x: function(x, is_right=True), X), want)
    np.testing.assert_array_equal(in_checked_mode(lambda x: function(x, is_right=False), X), jnp.cumsum(X))


def test_the_error_of_the_kernel_itself():
    refuse = op("Refuse", lambda x, *, text, is_invalid: x)
    for is_invalid in (False, True):
        with pytest.raises(eqxc.KernelError, match=r"mine\[native\]: kernel Refuse: odd") as caught:
            in_checked_mode(lambda x: refuse(x, text="odd", is_invalid=is_invalid), X)  # noqa: B023 - called at once
        assert isinstance(caught.value, ValueError) == is_invalid
