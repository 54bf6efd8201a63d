"""Kernels in CUDA C++ whose declaration is wrong, or does not fit the source: refused before anything runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback.backends._image import kernels_of

from .cuda_programs import F32, attributes, image_of, lowered, saxpy, simple


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ("const float* x", "2 parameters (a pointer for args[0], a pointer for result); got 1 parameters of 8 bytes"),
        ("const float* x, float* y, float* out", "2 parameters"),
        ("const double* x, float* out", "parameter 1 to be a pointer to float, for args[0]"),
        ("const __half* x, float* out", "parameter 1 to be a pointer to float, for args[0]"),
        ("const float* x, int* out", "parameter 2 to be a pointer to float, for result"),
        ("float x, float* out", "parameter 1 to be a pointer to float, for args[0]; got 2 parameters of 4, 8 bytes"),
        ("const signed char* x, float* out", "parameter 1 to be"),
    ],
)
def test_parameters_that_do_not_fit(parameters, text):
    source = f'#include <cuda_fp16.h>\nextern "C" __global__ void entry({parameters}) {{}}'
    with pytest.raises(ValueError, match="op\\[cuda\\]: expected entry to have") as error:
        lowered(simple(source), F32)
    assert text in str(error.value)


@pytest.mark.parametrize("scalar", ["long long", "float", "double", "int*", "short"])
def test_scalars_that_do_not_fit(scalar):
    source = f'extern "C" __global__ void entry(const float* x, float* out, {scalar} n) {{}}'
    with pytest.raises(ValueError, match="parameter 3 to be int, for n"):
        lowered(simple(source, scalars={"n": "int32"}), F32, n=3)


@pytest.mark.parametrize("pointee", ["float", "float4", "void", "char", "unsigned char", "Own"])
def test_pointers_that_fit(pointee):
    source = f'struct Own {{ float a, b; }};\nextern "C" __global__ void entry(const {pointee}* x, float* out) {{}}'
    lowered(simple(source), F32)


def test_raw_words_of_a_type_that_cpp_lacks():
    source = 'extern "C" __global__ void entry(const unsigned short* x, float* out) {}'
    lowered(simple(source), jax.ShapeDtypeStruct((8,), jnp.bfloat16))


def test_a_structure_is_no_parameter():
    source = 'struct P { float* x; };\nextern "C" __global__ void entry(P x, float* out) {}'
    with pytest.raises(ValueError, match="parameter 1 to be a pointer to float"):
        lowered(simple(source), F32)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("int8", 300), ("uint32", -1), ("int32", 2**40), ("int32", 1.5), ("float32", "x"), ("int32", jnp.ones(2))],
)
def test_scalar_values_that_do_not_fit(dtype, value):
    source = 'extern "C" __global__ void entry(const float* x, float* out, int n) {}'
    with pytest.raises(ValueError, match=f"expected the scalar n to be {dtype}"):
        lowered(simple(source, scalars={"n": (dtype, lambda x: value)}), F32)


@pytest.mark.parametrize("size", [4000, 5000, 32000])
def test_structures_of_many_bytes(size):
    """From 4,096 bytes of parameters on, a cubin says their sizes in another way."""
    source = (
        f'struct S {{ char bytes[{size}]; }};\nextern "C" __global__ void entry(const float* x, float* out, S s) {{}}'
    )
    structure = np.dtype(f"V{size}"), lambda x: bytes(size)
    image = image_of(lowered(simple(source, arch="sm_90", scalars={"s": structure}), F32))
    assert (kernels_of(image) or {})["entry"].parameters == (8, 8, size)
    smaller = np.dtype(f"V{size - 8}"), lambda x: bytes(size - 8)
    with pytest.raises(ValueError, match=f"parameter 3 to be a structure of {size - 8} bytes, for s"):
        lowered(simple(source, arch="sm_90", scalars={"s": smaller}), F32)


@pytest.mark.parametrize("value", [(1.5, 1.0), (np.float32(2), 1.0), (1, 1e6), (2**31, 1.0), (1,)])
def test_values_of_structures_that_do_not_fit(value):
    """As of scalars: a kernel would get other numbers."""
    source = 'struct S { int n; short a; };\nextern "C" __global__ void entry(const float* x, float* out, S s) {}'
    structure = np.dtype([("n", "i4"), ("a", "f2")], align=True)
    with pytest.raises(ValueError, match=r"op\[cuda\]: expected the scalar s to be a tuple or 8 bytes, for .*; got \("):
        lowered(simple(source, scalars={"s": (structure, lambda x: value)}), F32)
    lowered(simple(source, scalars={"s": (structure, lambda x: (1, np.inf))}), F32)


def test_numbers_in_the_other_order_of_bytes():
    source = 'extern "C" __global__ void entry(const float* x, float* out, int n) {}'
    other = lowered(simple(source, scalars={"n": (">i4", lambda x: 5)}), F32)
    assert attributes(other)["scalars"].tolist() == [5]


def test_options_that_ask_for_another_output():
    with pytest.raises(ValueError, match=r"op\[cuda\]: the compiler makes no image \(.*\). Leave out options that"):
        lowered(saxpy(arch="sm_90", options=["-dlto"]), F32, F32, a=2.0)


def test_a_scalar_that_nobody_passes():
    with pytest.raises(ValueError, match=r"the scalar n is not an option of this call \(there are a\).*scalars=\{'n'"):
        lowered(saxpy(scalars={"n": "int32", "a": "float32"}), F32, F32, a=2.0)


def test_a_cuda_kernel_on_another_platform():
    op = eqxc.Op("op", kernels={"rocm": saxpy()})
    with pytest.raises(ValueError, match=r"op\[cuda\]: expected the platform cuda; got rocm"):
        jax.jit(lambda x, y: op(x, y, a=2.0)).trace(F32, F32).lower(lowering_platforms=("rocm",))


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"source": 3}, TypeError, "expected source to be a text or a path; got 3"),
        ({"entry": 3}, TypeError, "expected entry to be the name of a function; got 3"),
        ({"launch": 3}, TypeError, "expected launch to be a Launch, or several"),
        ({"launch": ()}, TypeError, "expected launch to be a Launch, or several"),
        ({"scalars": {"n": "int4"}}, TypeError, "expected scalars to be"),
        ({"scalars": {"n": ("int32", 3)}}, TypeError, "expected scalars to be"),
        ({"scalars": ["n"]}, TypeError, "expected scalars to be"),
        ({"arch": "hopper"}, ValueError, "expected arch to be such as 'sm_90'"),
        ({"out_type": 3}, TypeError, "expected out_type to be a function"),
        ({"options": [3]}, TypeError, "expected options to be strings"),
        ({"options": ["-DA=\0"]}, ValueError, "expected options without the character NUL; got"),
        ({"options": ["-arch=sm_80"]}, ValueError, "expected the architecture in arch, as 'sm_90'; got '-arch=sm_80'"),
        (
            {"options": ["--gpu-architecture", "sm_80"]},
            ValueError,
            "expected the architecture in arch, as 'sm_90'; got",
        ),
    ],
)
def test_wrong_declarations(changed, error, text):
    with pytest.raises(error, match=text):
        saxpy(**changed)


@pytest.mark.parametrize("grid", [(), (1, 2, 3, 4), -1, 1.5, "x", (True,)])
def test_wrong_geometry(grid):
    with pytest.raises(TypeError, match="expected grid to be an integer or up to three, none negative"):
        eqxc.Launch(grid=grid, block=32)
    kernel = saxpy(launch=eqxc.Launch(grid=lambda *_, **__: grid, block=32))
    with pytest.raises(TypeError, match=r"op\[cuda\]: saxpy: expected grid to be an integer or up to three"):
        lowered(kernel, F32, F32, a=2.0)


@pytest.mark.parametrize(
    ("grid", "block", "shared", "text"),
    [
        ((1, 65536), 32, 0, "expected grid to be at most"),
        (2**31, 32, 0, "expected grid to be at most"),
        (1, (1, 1, 65), 0, "expected block to have 1 to 1024 threads, and 64 in z"),
        (1, 0, 0, "expected block to have 1 to 1024 threads"),
        (1, 32, 2**31, "expected shared_bytes to be a number of bytes"),
    ],
)
def test_geometry_that_no_gpu_has(grid, block, shared, text):
    with pytest.raises(ValueError if "shared" not in text else TypeError, match=rf"op\[cuda\]: saxpy: {text}"):
        lowered(saxpy(launch=eqxc.Launch(grid, block, shared)), F32, F32, a=2.0)


@pytest.mark.parametrize("workspaces", [[3], 3, lambda *_, **__: None])
def test_wrong_workspaces(workspaces):
    if workspaces == 3:
        with pytest.raises(TypeError, match="expected workspaces to be"):
            saxpy(workspaces=workspaces)
        return
    with pytest.raises(TypeError, match=r"op\[cuda\]: expected workspaces to be jax.ShapeDtypeStructs"):
        lowered(saxpy(workspaces=workspaces), F32, F32, a=2.0)


def test_a_function_that_fails_is_named():
    kernel = saxpy(launch=eqxc.Launch(grid=lambda x: 1, block=32))
    with pytest.raises(
        ValueError, match=r"op\[cuda\]: grid cannot be computed for this call \(.*unexpected keyword argument 'a'"
    ):
        lowered(kernel, F32, F32, a=2.0)
