"""Kernels in shared libraries of the user: what they get, what they give, and what is wrong with them."""

import json
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from .. import one_device
from ..persistent_cache import COUNT_HITS
from .library import SAXPY, build


X, Y = np.arange(3, dtype=np.float32) + 1, 10 * np.arange(3, dtype=np.float32)
F32 = jax.ShapeDtypeStruct((3,), jnp.float32)


def native(symbol, out_type=None, library=None, **options):
    return eqxc.NativeKernel(symbol, library or SAXPY, out_type, **options)


def saxpy_with(kernel):
    return eqxc.Op("saxpy", {"cpu": kernel}, lambda x, y, *, a: a * x + y)


# Attributes.

describe = eqxc.Op("describe", {"cpu": native("Describe", lambda **_: jax.ShapeDtypeStruct((80,), jnp.uint8))})


def text(result):
    return bytes(np.asarray(result)).rstrip(b"\0").decode()


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (True, "bool true"),
        (False, "bool false"),
        (1, "int64 1"),
        (0, "int64 0"),
        (-(2**63), "int64 -9223372036854775808"),
        (2**63 - 1, "int64 9223372036854775807"),
        (1.0, "double 1"),
        (0.0, "double 0"),
        (-0.0, "double -0"),
        (0.1, "double 0.10000000000000001"),
        (float("inf"), "double inf"),
        (float("nan"), "double nan"),
        (np.bool_(True), "bool true"),
        (np.int64(3), "int64 3"),
        (np.float64(3), "double 3"),
        ("", "string "),
        ("a name, ü", "string a name, ü"),
        ((), "span"),
        ((1,), "span 1"),
        ((3, -1, 2**40), "span 3 -1 1099511627776"),
        ((1.0,), "doubles 1.000000"),
        ((0.5, 2), "doubles 0.500000 2.000000"),
        ({"count": 3, "factors": (0.5, 2.0)}, "dictionary 2 count 3 factors 2"),
    ],
)
def test_attributes(value, want):
    assert text(describe(value=value)) == want
    assert text(jax.jit(lambda: describe(value=value))()) == want


def test_a_mapping_is_an_option_by_its_items():
    """In any order, and changed afterwards it is another one."""
    given = {"count": 1, "factors": (1.0,)}
    program = jax.jit(lambda: describe(value=given))
    assert text(program()) == "dictionary 2 count 1 factors 1"
    given["count"] = 2
    assert text(program()) == "dictionary 2 count 1 factors 1"
    assert text(describe(value=given)) == text(describe(value=dict(reversed(given.items())))) != text(program())


def test_attributes_that_are_equal_but_not_the_same():
    """In one program, and in the order that would find the other one's in a cache."""
    values = [1, True, 1.0, 0.0, -0.0, False, 0]
    want = ["int64 1", "bool true", "double 1", "double 0", "double -0", "bool false", "int64 0"]
    assert [text(x) for x in jax.jit(lambda: [describe(value=value) for value in values])()] == want
    assert [text(describe(value=value)) for value in reversed(values)] == want[::-1]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            None,
            r"describe\[native\]: the option value is None of type NoneType, which a native kernel cannot take\. Expected",
        ),
        ({}, r"the option value is \{\} of type dict"),
        ({"a": None}, r"the option value\['a'\] is None of type NoneType"),
        ({1: 2}, r"the option value is \{1: 2\} of type dict"),
        ((True,), r"the option value is \(True,\) of type tuple"),
        ((1, "x"), r"the option value is \(1, 'x'\) of type tuple"),
        (jnp.float32, r"the option value is <class 'jax.numpy.float32'>"),
        (2**63, r"the option value is 9223372036854775808, .* integers of 64 bits"),
        ((1, -(2**63) - 1), r"integers of 64 bits"),
    ],
)
def test_attributes_that_no_kernel_takes(value, message):
    with pytest.raises((TypeError, OverflowError), match=message):
        describe(value=value)


def test_a_reference_takes_any_option():
    op = eqxc.Op("power", {}, lambda x, *, f: f(x))
    np.testing.assert_array_equal(op(X, f=jnp.square), X**2)


# In place.


@pytest.mark.parametrize("aliases", [{"x": 0}, {0: 0}, {"x": "sum"}, {0: "sum"}])
def test_in_place(aliases):
    op = eqxc.Op("add_in_place", {"cpu": native("AddInPlace", aliases=aliases)}, lambda x, y: {"sum": x + y})
    x = jnp.arange(1000.0)
    y = jnp.ones(1000)
    got = jax.jit(op)(x, y)["sum"]  # nobody gave x away
    np.testing.assert_array_equal(got, np.arange(1000) + 1)
    np.testing.assert_array_equal(x, np.arange(1000))
    np.testing.assert_array_equal(op(x, y)["sum"], got)
    pointer = x.unsafe_buffer_pointer()
    got = jax.jit(op, donate_argnums=0)(x, y)["sum"]
    assert got.unsafe_buffer_pointer() == pointer
    assert x.is_deleted()
    np.testing.assert_array_equal(got, np.arange(1000) + 1)


def test_in_place_in_a_loop():
    """XLA copies once, before the loop, if at all."""
    op = eqxc.Op("add_in_place", {"cpu": native("AddInPlace", aliases={"x": 0})}, lambda x, y: x + y)
    y = jnp.ones(1000)
    f = jax.jit(lambda x: jax.lax.fori_loop(0, 5, lambda _, x: op(x, y), x), donate_argnums=0)
    x = jnp.arange(1000.0)
    program = f.lower(x).compile()
    assert "f32[1000]{0} copy(" not in str(program.as_text())
    pointer = x.unsafe_buffer_pointer()
    got = program(x)
    assert got.unsafe_buffer_pointer() == pointer
    np.testing.assert_array_equal(got, np.arange(1000) + 5)


def test_what_is_overwritten_may_be_needed_later():
    op = eqxc.Op("add_in_place", {"cpu": native("AddInPlace", aliases={"x": 0})}, lambda x, y: x + y)
    got, x = jax.jit(lambda x: (op(x, Y), x))(X)
    np.testing.assert_array_equal(got, X + Y)
    np.testing.assert_array_equal(x, X)


@pytest.mark.parametrize(
    ("aliases", "message"),
    [
        (
            {"z": 0},
            r"Op\(add_in_place\): .* has the input 'z', which is not the name of an array among the inputs .*x, y",
        ),
        ({5: 0}, r"has the input 5, but there are 2 flat inputs"),
        ({"x": 1}, r"has the output 1, but there are 1 flat outputs"),
        ({"x": "total"}, r"has the output 'total', which is not the name of an array among the outputs"),
    ],
)
def test_wrong_aliases(aliases, message):
    op = eqxc.Op("add_in_place", {"cpu": native("AddInPlace", aliases=aliases)}, lambda x, y: x + y)
    with pytest.raises(ValueError, match=message):
        op(X, Y)


# Failures.


@pytest.mark.parametrize("jit", [False, True])
def test_an_error_of_the_kernel(jit):
    op = eqxc.Op("fail", {"cpu": native("Fail", lambda x: F32)})
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"fail\[native\]: kernel Fail: this kernel always fails"):
        jax.block_until_ready((jax.jit(op) if jit else op)(X))
    np.testing.assert_array_equal(saxpy_with(native("Saxpy"))(X, Y, a=1.0), X + Y)


def test_wrong_operands_are_an_error_of_the_handler():
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"Wrong scalar data type: expected F64 but got S64"):
        saxpy_with(native("Saxpy"))(X, Y, a=1)  # the attribute is a double
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"Wrong buffer dtype: expected F32 but got F16"):
        saxpy_with(native("Saxpy"))(X.astype(np.float16), Y.astype(np.float16), a=1.0)


@pytest.mark.parametrize(
    ("symbol", "library", "message"),
    [
        (
            "Saxpy",
            "/nowhere/libsaxpy.so",
            r"saxpy\[native\]: the library /nowhere/libsaxpy.so cannot be loaded \(.*No such",
        ),
        ("Saxpy", "/", r"the library / cannot be loaded \(.*\)\. Build it, or correct the path"),
        ("Saxpy", __file__, r"cannot be loaded \(.*invalid ELF header"),
        (
            "Missing",
            None,
            r"has no symbol 'Missing'\. Export it, with XLA_FFI_DEFINE_HANDLER_SYMBOL\(Missing, \.\.\.\)",
        ),
        ("saxpy", None, r"has no symbol 'saxpy'"),  # static in the library
        ("NewerMinor", None, r"XLA refuses the handler 'NewerMinor' of .* API version .* Build it with the headers"),
        ("NewerMajor", None, r"XLA refuses the handler 'NewerMajor' of .* API version"),
        (
            "NotAHandler",
            None,
            r"expected an XLA FFI handler; got the function 'NotAHandler' of .*, which did not answer",
        ),
    ],
)
def test_a_wrong_library(symbol, library, message):
    for _ in range(2):  # an error that is forgotten would be a crash later
        with pytest.raises(ValueError, match=message):
            saxpy_with(native(symbol, library=library))(X, Y, a=1.0)
    np.testing.assert_array_equal(saxpy_with(native("Saxpy"))(X, Y, a=1.0), X + Y)


def test_a_symbol_that_this_package_lacks():
    op = saxpy_with(eqxc.NativeKernel("saxpy"))
    with pytest.raises(
        ValueError, match=r"saxpy\[native\]: expected a symbol of this package for cpu; .* pass library=PATH"
    ):
        op(X, Y, a=1.0)
    op = eqxc.Op("rms_norm", {"cuda": eqxc.NativeKernel("norm")}, lambda x, *, eps: x)
    np.testing.assert_array_equal(op(X, eps=1.0), X)  # on the CPU there is the reference
    with pytest.raises(ValueError, match=r"expected a symbol of this package for cuda; got 'norm'"):
        jax.jit(lambda x: op(x, eps=1.0)).trace(X).lower(lowering_platforms=("cuda",))


REFUSED_FIRST = """
import sys
import jax, numpy as np, eqxcallback as eqxc
from jax._src import xla_bridge

x = np.ones(3, np.float32)
op = lambda symbol: eqxc.Op("saxpy", {"cpu": eqxc.NativeKernel(symbol, sys.argv[1])}, lambda x, y, *, a: a * x + y)
assert not xla_bridge._backends
for symbol in ("NewerMinor", "NewerMajor", "NotAHandler"):
    try:
        jax.jit(lambda x: op(symbol)(x, x, a=2.0)).trace(x).lower(lowering_platforms=("cpu",))
    except ValueError as error:
        assert ("got the function" if symbol == "NotAHandler" else "XLA refuses the handler") in str(error), error
    else:
        raise AssertionError(symbol)
print(op("Saxpy")(x, x, a=2.0), jax.devices())
"""


def test_a_handler_that_is_refused_leaves_the_backend_alive():
    """In a process that had none. A registration that waits for the backend would keep it from starting at all."""
    environment = {**one_device.environment(), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", REFUSED_FIRST, str(SAXPY)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.stdout == "[3. 3. 3.] [CpuDevice(id=0)]\n", result.stderr


# Libraries that are built again.


def add_amount(path):
    return eqxc.Op("add_amount", {"cpu": eqxc.NativeKernel("AddAmount", path)}, lambda x: x)


@pytest.fixture(scope="module")
def amounts(tmp_path_factory):
    """The same library, of two contents."""
    folder = tmp_path_factory.mktemp("amounts")
    return [build(folder / f"lib{amount}.so", "amount.cc", f"-DAMOUNT={amount}") for amount in (1, 2)]


def install(source, target):
    """As a build does: a new file under the old name."""
    temporary = target.with_suffix(".new")
    temporary.write_bytes(source.read_bytes())
    time.sleep(0.01)  # another time of modification
    temporary.replace(target)


def test_a_rebuilt_library(amounts, tmp_path):
    """A program that is lowered afterwards calls the new code, the others the old one."""
    path = tmp_path / "libamount.so"
    install(amounts[0], path)
    old = jax.jit(lambda x: add_amount(path)(x))
    np.testing.assert_array_equal(old(X), X + 1)
    install(amounts[1], path)
    np.testing.assert_array_equal(old(X), X + 1)
    new = jax.jit(lambda x: add_amount(path)(x) * 1)
    np.testing.assert_array_equal(new(X), X + 2)
    install(amounts[0], path)
    again = jax.jit(lambda x: add_amount(path)(x) * 2)
    np.testing.assert_array_equal(again(X), 2 * (X + 1))
    np.testing.assert_array_equal(new(X), X + 2)


def test_one_content_under_two_names(amounts, tmp_path):
    targets = []
    for name in ("a.so", "b.so"):
        install(amounts[0], tmp_path / name)
        text = jax.jit(add_amount(tmp_path / name)).lower(X).as_text()
        targets.append(text.split("custom_call @")[1].split("(")[0])
        np.testing.assert_array_equal(add_amount(tmp_path / name)(X), X + 1)
    assert targets[0] == targets[1]


def test_relative_paths_are_of_the_folder_where_the_kernel_was_made(amounts, tmp_path, monkeypatch):
    install(amounts[0], tmp_path / "libamount.so")
    monkeypatch.chdir(tmp_path)
    kernel = eqxc.NativeKernel("AddAmount", "libamount.so")
    monkeypatch.chdir("/")
    np.testing.assert_array_equal(eqxc.Op("add_amount", {"cpu": kernel}, lambda x: x)(X), X + 1)


PROGRAM = (
    COUNT_HITS
    + """
import json, sys
import jax, numpy as np, eqxcallback as eqxc

op = eqxc.Op("add_amount", {"cpu": eqxc.NativeKernel("AddAmount", sys.argv[2])}, lambda x: x)
x = np.ones(2, np.float32)
program = jax.jit(lambda x: op(x) * 10).lower(x).compile()
found = len(hits)
print(json.dumps([float(np.asarray(program(x))[0]), found]))
"""
)


def test_the_persistent_cache(amounts, tmp_path):
    """A program of another process calls the library of this one; but not after it has changed."""
    path = tmp_path / "libamount.so"
    environment = one_device.environment()

    def run(source):
        install(source, path)
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "cache"), str(path)]
        output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        return json.loads(output)

    assert [run(amounts[i]) for i in (0, 0, 1, 0)] == [[20.0, 0], [20.0, 1], [30.0, 0], [20.0, 1]]


# The declaration.

made: Any = eqxc.NativeKernel


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: eqxc.NativeKernel("a b"),
            ValueError,
            r"NativeKernel: expected symbol to be the name of a C function; got 'a b'",
        ),
        (lambda: made(3), ValueError, r"expected symbol to be the name of a C function; got 3"),
        (lambda: made("f", 3), TypeError, r"NativeKernel\(f\): expected library to be a path; got 3"),
        (
            lambda: made("f", out_type=3),
            TypeError,
            r"NativeKernel\(f\): expected out_type to be a function; got 3",
        ),
    ],
)
def test_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_kernels_are_values():
    make = lambda **options: eqxc.NativeKernel("f", "/lib.so", **options)
    assert make() == make()
    assert hash(make(aliases={"x": 0})) == hash(make(aliases={"x": 0}))
    assert make() != make(aliases={"x": 0})
    assert make().library == "/lib.so"
