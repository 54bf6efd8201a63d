"""Mistakes in a kernel of TVM-FFI are one error each, before anything runs where that can be known."""

import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import pytest

import eqxcallback as eqxc
from eqxcallback import Op, TvmFfiKernel

from . import library
from .library import saxpy, saxpy_reference, tvm_ffi


# Nothing here is about JAX.
pytestmark = pytest.mark.any_jax_version

X = jnp.ones(4)


def op(kernel, **more):
    return Op("saxpy", kernels={"cpu": kernel}, reference=saxpy_reference, **more)


def lower(kernel, platform="cpu"):
    of_platform = Op("saxpy", kernels={platform: kernel}, reference=saxpy_reference)
    return jax.jit(lambda x, y: of_platform(x, y, a=2.0)).trace(X, X).lower(lowering_platforms=(platform,))


@pytest.mark.parametrize(
    ("arguments", "more", "error"),
    [
        (
            (5, "f"),
            {},
            "expected module to be the path of a library, a tvm_ffi.Module, a tvm_ffi.Function or None; got 5",
        ),
        (("a.so", ""), {}, "expected name to be that of a function; got ''"),
        (("a.so", None), {}, "expected name to be that of a function; got None"),
        (("a.so", "f", "args"), {}, "expected arg_spec to be a tuple of words and numbers; got 'args'"),
        (("a.so", "f", (1j,)), {}, "expected the words of arg_spec to be texts, numbers, bools or None; got 1j"),
        (
            ("a.so", "f"),
            {"scalars": {"n": 3}},
            "TvmFfiKernel(f): expected scalars to be {name: function}; got {'n': 3}",
        ),
        (("a.so", "f"), {"out_type": 3}, "expected out_type to be a function; got 3"),
    ],
)
def test_declarations(arguments, more, error):
    with pytest.raises((TypeError, ValueError), match=re.escape(error)):
        TvmFfiKernel(*arguments, **more)


@pytest.mark.parametrize(
    ("word", "error"),
    [
        (
            "z",
            "expected args, rets, workspaces, args[i] or rets[i]; an array of the call (x, y, out); an option (a), also as",
        ),
        ("attrs.b", "expected args, rets, workspaces, args[i] or rets[i]"),
        ("ctx.device", "expected args, rets, workspaces, args[i] or rets[i]"),
        ("args[2]", "this call has 2 args"),
        ("rets[ 1 ]", "this call has 1 rets"),
        ("workspace[0]", "expected args, rets, workspaces"),
        ("b'bytes'", "expected a bool, an int of 64 bits, a float, a text or None; got b'bytes'"),
        ("'a\\0b'", "expected a bool, an int of 64 bits, a float, a text or None; got 'a\\x00b'"),
        ("'\\ud800'", "expected a bool, an int of 64 bits, a float, a text or None; got '\\ud800'"),
        (str(2**63), f"expected a bool, an int of 64 bits, a float, a text or None; got {2**63}"),
    ],
)
def test_words(word, error):
    with pytest.raises(ValueError, match=re.escape(f"saxpy[tvm_ffi]: the word {word!r} of arg_spec: {error}")):
        lower(TvmFfiKernel(library.PATH, "saxpy", (word,)))


def test_an_option_of_a_wrong_type():
    with pytest.raises(ValueError, match=r"the word 'a' of arg_spec: expected a bool, .* or None; got \(1, 2\)"):
        Op("saxpy", kernels={"cpu": saxpy(out_type=lambda x, y, *, a: x)})(X, X, a=(1, 2))


@pytest.mark.parametrize(
    "made", [5, [5], jax.ShapeDtypeStruct((1,), jnp.float32), [jax.ShapeDtypeStruct((-1,), jnp.float32)]]
)
def test_workspaces(made):
    with pytest.raises(TypeError, match=r"saxpy\[tvm_ffi\]: expected workspaces to be jax.ShapeDtypeStructs; got .*\("):
        lower(saxpy(workspaces=lambda *_, **__: made))


def test_a_library_that_is_missing():
    with pytest.raises(
        ValueError, match=r"saxpy\[tvm_ffi\]: the library /nowhere/a.so cannot be loaded .* correct the"
    ):
        lower(TvmFfiKernel("/nowhere/a.so", "saxpy"))


def test_functions_that_are_missing():
    with pytest.raises(
        ValueError, match=r"symbol '__tvm_ffi_f'. Export it with TVM_FFI_DLL_EXPORT_TYPED_FUNC\(f, \.\.\."
    ):
        lower(TvmFfiKernel(library.PATH, "f"))
    with pytest.raises(ValueError, match=r"the module .*Module.* has no function 'f'. Correct the name"):
        lower(TvmFfiKernel(tvm_ffi.load_module(library.PATH), "f"))
    with pytest.raises(ValueError, match=r"expected 'f' to be the name of a global function of TVM-FFI; there is none"):
        lower(TvmFfiKernel(None, "f"))
    with pytest.raises(ValueError, match=r"expected module to be a tvm_ffi.Module or a tvm_ffi.Function; got [(\[]1"):
        lower(TvmFfiKernel(tvm_ffi.convert((1,)), "f"))


def test_a_library_that_is_not_of_tvm_ffi(tmp_path, monkeypatch):
    def refuse(path):
        raise RuntimeError("no loader for kind xyz")

    copy = tmp_path / "copy.so"
    copy.write_bytes(pathlib.Path(library.PATH).read_bytes())
    monkeypatch.setattr(tvm_ffi, "load_module", refuse)
    with pytest.raises(ValueError, match=r"TVM-FFI does not load the library .*copy.so \(no loader for kind xyz\)"):
        lower(TvmFfiKernel(copy, "saxpy", library.SAXPY))


def test_elements_of_less_than_a_byte():
    for dtype in (jnp.int4, jnp.uint2, jnp.float4_e2m1fn):
        x = jnp.zeros(4, dtype)
        with pytest.raises(
            ValueError, match=rf"whole bytes, as DLPack has them; got {jnp.dtype(dtype).name}\. Cast it"
        ):
            Op("saxpy", kernels={"cpu": TvmFfiKernel(library.PATH, "saxpy", out_type=lambda x: x)})(x)


def test_another_platform():
    with pytest.raises(ValueError, match=r"saxpy\[tvm_ffi\]: expected the platform cpu or cuda; got rocm"):
        lower(saxpy(), platform="rocm")


def test_errors_that_functions_raise():
    with pytest.raises(
        eqxc.KernelError, match=r"kernel saxpy: ValueError: expected as many elements; got 1 \["
    ) as caught:
        op(saxpy())(X, jnp.ones(1), a=1.0)
    assert isinstance(caught.value, ValueError)
    assert "float32[4], float32[1]" in str(caught.value)
    failing = {
        "activation": (("x", "'silu'", None, "out"), r"KeyError: no kind silu"),
        "saxpy": (("x", "out"), r"TypeError: Mismatched number of arguments"),
        "takes_an_owner": (
            ("x",),
            r"TypeError: Mismatched type on argument #0 .*Expected `ffi.Tensor` but got `DLTensor\*`",
        ),
        "asks_for_memory": (("x",), r"RuntimeError: TVMFFIEnvTensorAlloc: allocator"),
        "fails_silently": ((), r"it returned -7 without an error"),
        "returns_an_object": (("x",), r"it returned an object, which nobody reads: .* Return nothing"),
    }
    for name, (words, error) in failing.items():
        function = TvmFfiKernel(library.PATH, name, words, out_type=lambda x: x)
        with pytest.raises(eqxc.KernelError, match=error):
            Op(name, kernels={"cpu": function})(X)


def test_objects_that_are_raised_or_returned_are_given_back():
    def call(name, *words, out_type=lambda x: x):
        return Op(name, kernels={"cpu": TvmFfiKernel(library.PATH, name, words, out_type=out_type)})(X)

    for name in ("returns_an_object", "raises_an_object"):
        for _ in range(3):
            with pytest.raises(eqxc.KernelError, match=r"it returned an object|RuntimeError: the one that is kept"):
                call(name, "x")
    counts = call("references", "x", "out", out_type=lambda x: jax.ShapeDtypeStruct((2,), jnp.int32))
    assert counts.tolist() == [1, 1]


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)
    reason = r"tvm_ffi cannot be imported \(.*\). Install eqxcallback\[tvm-ffi\]\."
    assert re.match(reason, str(eqxc.available_backends()["tvm_ffi"]))
    with pytest.warns(eqxc.PerformanceWarning, match=f"tvm_ffi kernels are passed over: {reason}"):
        assert op(saxpy())(X, X, a=1.0).tolist() == [2.0] * 4  # the reference
    with pytest.raises(ValueError, match=rf"saxpy\[tvm_ffi\]: {reason}"):
        op(saxpy(), implementation="tvm_ffi")(X, X, a=1.0)
