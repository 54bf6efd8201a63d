"""Mistakes in a C kernel are one error each, before anything runs where that can be known."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import eqxcallback as eqxc
from eqxcallback import CKernel, Op

from . import library
from .library import SAXPY, kernel, saxpy, saxpy_reference


def lower(function, *args, platform="cpu", **options):
    op = Op(function.symbol, kernels={platform: function}, reference=saxpy_reference)
    arrays = args or (jnp.ones(4), jnp.ones(4))
    lowered = jax.jit(lambda *xs: op(*xs, **{"a": 2.0, **options})).trace(*arrays)
    return lowered.lower(lowering_platforms=(platform,))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("sax py", "lib.so"), "expected symbol to be the name of a C function; got 'sax py'"),
        (("saxpy",), "expected a library, a source or an address; got none of them"),
        (
            ("saxpy", "lib.so", (), {"address": 5}),
            "expected a library, a source or an address; got library and address",
        ),
        (("saxpy", 7), "expected library to be a path; got 7"),
        (("saxpy", None, (), {"address": "x"}), "expected address to be that of a function"),
        (("saxpy", "lib.so", "x, y"), "expected parameters to be a tuple of texts; got 'x, y'"),
        (("saxpy", "lib.so", ("x", 1)), "expected parameters to be a tuple of texts"),
        (("saxpy", "lib.so", (), {"scalars": {"n": 3}}), "expected scalars to be {name: function}"),
        (("saxpy", "lib.so", (), {"status": {"3": 3}}), "expected status to be a bool, or {number: text}"),
        (("saxpy", "lib.so", (), {"rows": "some"}), "expected rows to be a tuple of texts; got 'some'"),
    ],
)
def test_declarations(arguments, error):
    positional = [argument for argument in arguments if not isinstance(argument, dict)]
    named = next((argument for argument in arguments if isinstance(argument, dict)), {})
    with pytest.raises((TypeError, ValueError), match=re.escape(error)):
        CKernel(*positional, **named)


@pytest.mark.parametrize(
    ("parameter", "error"),
    [
        (
            "nothing",
            "expected 'nothing' to be a number, an array of the call (x, y, out), its size, ndim, shape[i] or ",
        ),
        ("x.length", "expected 'x.length' to be a number"),
        ("const double* x", "expected an array of that type; got the dtype float32 of x"),
        ("float x", "expected a pointer, as x is an array. Write float*"),
        ("float** x", "expected at most one *"),
        ("half* x", "expected a type of C, without typedefs of your own; got 'half'"),
        ("void a", "expected a type of numbers, as a is one"),
        ("int* 3", "expected a type of numbers, as 3 is one"),
        ("int8_t 200", "expected a number that fits int8_t; got 200"),
        ("unsigned -1", "expected a number that fits unsigned; got -1"),
        ("int a", "expected a number that fits int; got 2.0"),
        ("float 1e60", "expected a number that fits float; got 1e+60"),
        ("x.shape[1]", "x has the shape (4,) in this call"),
        ("", "expected a type, which may be left out, and a name or a number"),
    ],
)
def test_parameters(parameter, error):
    with pytest.raises(ValueError, match=re.escape(f"saxpy[c]: the parameter {parameter!r}: {error}")):
        lower(kernel("saxpy", parameter))


def test_a_size_that_does_not_fit():
    function = kernel("saxpy", "int8_t x.size", *SAXPY[1:], rows="parallel")
    with pytest.raises(ValueError, match="expected a number that fits int8_t"):
        lower(function, jnp.ones(1000), jnp.ones(1000))


def test_too_many_parameters():
    for parameter in ("1", "1.0"):
        with pytest.raises(ValueError, match=r"expected at most \d pointers and integers, 8 floating .*; got 60"):
            lower(kernel("nothing", *[parameter] * 60))


@pytest.mark.parametrize(
    "made", [5, [5], jax.ShapeDtypeStruct((1,), jnp.float32), [jax.ShapeDtypeStruct((-1,), jnp.float32)]]
)
def test_workspaces(made):
    with pytest.raises(TypeError, match=r"saxpy\[c\]: expected workspaces to be jax.ShapeDtypeStructs; got .*\("):
        lower(kernel("saxpy", *SAXPY, workspaces=lambda *_, **__: made))


def test_a_library_that_is_missing():
    with pytest.raises(
        ValueError, match=r"saxpy\[c\]: the library /nowhere/lib.so cannot be loaded .* correct the path"
    ):
        lower(CKernel("saxpy", "/nowhere/lib.so", SAXPY))


def test_a_path_that_no_file_has():
    with pytest.raises(
        ValueError, match=r"CKernel\(saxpy\): expected library to be a path; got 'a\\x00b', whose character NUL"
    ):
        CKernel("saxpy", "a\0b", SAXPY)


def test_a_library_that_is_cut_off(tmp_path):
    """As where it is written at the moment. The loader would end the process."""
    path = tmp_path / "lib.so"
    content = library.path().read_bytes()
    path.write_bytes(content[: len(content) // 2])
    code = f"""
import eqxcallback as eqxc, jax.numpy as jnp
op = eqxc.Op("saxpy", kernels={{"cpu": eqxc.CKernel("saxpy", {str(path)!r}, ("out",))}}, reference=lambda x: x)
op(jnp.ones(2))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"saxpy[c]: the library {path} cannot be loaded ({path} is not whole). Build it" in result.stderr


def test_a_library_of_another_processor(tmp_path):
    path = tmp_path / "lib.so"
    content = bytearray(library.path().read_bytes())
    content[0x12] = 0xF3  # RISC-V
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"the library .*lib\.so cannot be loaded"):
        lower(CKernel("saxpy", path, SAXPY))


def test_a_symbol_that_is_missing():
    with pytest.raises(ValueError, match=r"has no symbol 'saxpyy'. Export it; of C\+\+ as extern \"C\""):
        lower(kernel("saxpyy", *SAXPY))


def test_another_platform():
    with pytest.raises(ValueError, match=r"saxpy\[c\]: expected the platform cpu; got cuda"):
        lower(saxpy(), platform="cuda")


def test_a_status():
    with jax.enable_x64(True):
        function = kernel("softmax_rows", "x.size", "x.shape[-1]", "x", "out", status=True)
        op = Op("softmax_rows", kernels={"cpu": function}, reference=lambda x: x)
        with pytest.raises(eqxc.KernelError, match=r"kernel softmax_rows: it returned 3 \[") as caught:
            op(jnp.full((2, 2), -1.0))
    assert "float64[2,2]" in str(caught.value)


def test_the_text_of_a_status_has_two_lines():
    with jax.enable_x64(True):
        texts = {1: "one\n3=wrong", 3: "negative\nnumbers"}
        function = kernel("softmax_rows", "x.size", "x.shape[-1]", "x", "out", status=texts)
        op = Op("softmax_rows", kernels={"cpu": function}, reference=lambda x: x)
        with pytest.raises(eqxc.KernelError, match=r"it returned 3: negative numbers \["):
            op(jnp.full((2, 2), -1.0))


def test_a_status_that_nobody_asked_for_is_no_error():
    with jax.enable_x64(True):
        function = kernel("softmax_rows", "x.size", "x.shape[-1]", "x", "out")
        op = Op("softmax_rows", kernels={"cpu": function}, reference=lambda x: x)
        assert op(jnp.full((2, 2), -1.0)).shape == (2, 2)


def test_symbolic_sizes_of_an_exported_program():
    op = Op("saxpy", kernels={"cpu": saxpy()}, reference=saxpy_reference)
    (size,) = jax.export.symbolic_shape("n")
    x = jax.ShapeDtypeStruct((size,), jnp.float32)
    exported = eqxc.export(jax.jit(lambda x: op(x, x, a=2.0)))(x)  # the reference takes them
    assert exported.call(jnp.ones(3)).tolist() == [3, 3, 3]
    op = Op("saxpy", kernels={"cpu": saxpy()}, reference=saxpy_reference, implementation="c")
    with pytest.raises(ValueError, match="what it is called with depends on sizes"):
        eqxc.export(jax.jit(lambda x: op(x, x, a=2.0)))(x)


def test_an_address_is_no_name_for_other_processes():
    """A program that calls one is not found in the cache of another process."""
    one, other = (CKernel("saxpy", address=at, parameters=SAXPY, aliases={"y": 0}) for at in (4096, 8192))
    texts = {lower(op).as_text() for op in (one, other)}
    assert len(texts) == 2
