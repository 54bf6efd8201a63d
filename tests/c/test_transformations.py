"""C kernels under JAX's transformations, in checked mode, exported, and of other languages' libraries."""

import dataclasses
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import CKernel, Op

from . import library
from .library import build, kernel, saxpy, saxpy_reference


BACKWARD = kernel(
    "saxpy_backward", "dout.size", "float a", "const float* dout", "dx.size", "float* dx", "dy.size", "float* dy"
)


def op(**more):
    return Op("saxpy", kernels={"cpu": saxpy()}, reference=saxpy_reference, **more)


def test_gradients_in_c():
    """All else that is asked of a kernel: tests/layer/test_kinds.py."""
    with_backward = op(backward={"cpu": BACKWARD}, vmap_method="broadcast_all")
    rows = ("reference", "grad", "partial grads", "vmap", "grad of vmap")
    assert eqxc.testing.check(with_backward, jnp.arange(6.0), jnp.ones(6), a=2.0, only=rows).passed


@pytest.mark.parametrize("needed", [(0,), (1,), (0, 1)])
def test_gradients_that_are_not_needed_are_null(needed):
    with_backward = op(backward={"cpu": BACKWARD})
    grads = jax.grad(lambda x, y: (with_backward(x, y, a=3.0) ** 2).sum(), needed)(jnp.ones(5), jnp.ones(5))
    expected = {0: 24.0, 1: 8.0}
    for index, grad in zip(needed, grads, strict=True):
        np.testing.assert_array_equal(grad, np.full(5, expected[index]))


def test_two_devices():
    """Each has a part of the array, and its size is that of the part."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    divided = op(sharding="i, i -> i")
    x = jax.device_put(jnp.arange(8.0), where)
    out = jax.jit(lambda x: divided(x, x, a=2.0))(x)
    np.testing.assert_array_equal(out, 3 * np.arange(8.0))
    assert out.sharding.is_equivalent_to(where, 1)


def test_what_it_writes_beyond_its_result_is_found():
    function = kernel("writes_too_much", "x.size", "x", "out", out_type=lambda x: x)
    bad = Op("writes_too_much", kernels={"cpu": function})
    with eqxc.debug.checked(), pytest.raises(eqxc.KernelError, match="writes_too_much"):
        jax.block_until_ready(bad(jnp.ones(4)))


def test_checked_mode_lets_a_good_one_pass():
    with eqxc.debug.checked():
        np.testing.assert_array_equal(op()(jnp.ones(4), jnp.ones(4), a=1.0), np.full(4, 2.0))


def test_an_exported_program_finds_its_library(tmp_path):
    program = eqxc.export(jax.jit(lambda x: op()(x, x, a=2.0)))(jnp.ones(3))
    file = tmp_path / "program"
    file.write_bytes(program.serialize())
    text = f"""
import eqxcallback as eqxc, jax.numpy as jnp
try:
    eqxc.load({str(file)!r})
except ValueError as error:
    print(error)
kernel = eqxc.CKernel("saxpy", {str(library.path())!r}, {library.SAXPY!r}, aliases={{"y": 0}})
eqxc.Op("saxpy", kernels={{"cpu": kernel}}, reference=lambda x, y, *, a: a * x + y).register()
print(eqxc.load({str(file)!r}).call(jnp.ones(3)).tolist())
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    error, out = done.stdout.splitlines()
    assert "the program calls saxpy of a library of yours" in error
    assert out == "[3.0, 3.0, 3.0]"


def test_a_library_that_was_built_again(tmp_path):
    source = tmp_path / "one.c"
    calls = []
    for factor in (2, 3):
        text = "void times(long n, const float* x, float* out) { for (long i = 0; i < n; ++i) out[i] = %d * x[i]; }\n"
        source.write_text(text % factor)
        build(tmp_path / "one.so", source)
        function = CKernel("times", tmp_path / "one.so", ("x.size", "x", "out"), out_type=lambda x: x)
        calls.append(jax.jit(lambda x, function=function: Op("times", kernels={"cpu": function})(x)))
        assert calls[-1](jnp.ones(1)).tolist() == [factor]
    assert calls[0](jnp.ones(1)).tolist() == [2]


def blas():
    """The OpenBLAS that NumPy's wheel brings."""
    folder = pathlib.Path(np.__file__).parents[1] / "numpy.libs"
    libraries = sorted(folder.glob("libscipy_openblas64_*.so"))
    if not libraries:
        pytest.skip("this NumPy has no OpenBLAS of its own")
    return libraries[0]


def test_saxpy_of_a_blas_that_is_installed():
    function = CKernel(
        "scipy_cblas_saxpy64_",
        blas(),
        ("int64_t x.size", "float a", "const float* x", "int64_t 1", "float* out", "int64_t 1"),
        aliases={"y": 0},
    )
    axpy = Op("axpy", kernels={"cpu": function}, reference=saxpy_reference, vmap_method="broadcast_all")
    assert eqxc.testing.check(axpy, jnp.arange(5.0), jnp.ones(5), a=0.5).passed


def test_gemm_of_a_blas_that_is_installed():
    row_major, plain = "int 101", "int 111"
    function = CKernel(
        "scipy_cblas_dgemm64_",
        blas(),
        (
            *(row_major, plain, plain, "a.shape[0]", "b.shape[1]", "a.shape[1]", "double 1"),
            *("const double* a", "a.strides[0]", "const double* b", "b.strides[0]", "double 0", "double* out"),
            "out.strides[0]",
        ),
    )
    matmul = Op("matmul", kernels={"cpu": function}, reference=lambda a, b: a @ b)
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        a, b = jnp.asarray(rng.random((5, 7))), jnp.asarray(rng.random((7, 3)))
        np.testing.assert_allclose(matmul(a, b), a @ b, rtol=1e-14)
        assert eqxc.testing.check(matmul, a, b).passed


RUST = """
#[no_mangle]
pub unsafe extern "C" fn relu(n: usize, x: *const f32, out: *mut f32) -> i32 {
    let (x, out) = (std::slice::from_raw_parts(x, n), std::slice::from_raw_parts_mut(out, n));
    for (o, x) in out.iter_mut().zip(x) { *o = x.max(0.0); }
    0
}
"""


@pytest.mark.skipif(shutil.which("rustc") is None, reason="there is no Rust compiler here")
def test_a_function_in_rust(tmp_path):
    source, path = tmp_path / "relu.rs", tmp_path / "librelu.so"
    source.write_text(RUST)
    subprocess.run(["rustc", "--crate-type=cdylib", "-O", source, "-o", path], check=True)
    function = CKernel("relu", path, ("size_t x.size", "const float* x", "float* out"), status=True, rows="parallel")
    relu = Op("relu", kernels={"cpu": function}, reference=jax.nn.relu, vmap_method="fold")
    assert eqxc.testing.check(relu, jnp.linspace(-2.0, 1.9, 6)).passed


FORTRAN = """
subroutine row_norms(columns, rows, x, out) bind(c)
  use iso_c_binding
  integer(c_int64_t), value :: columns, rows
  real(c_float), intent(in) :: x(columns, rows)
  real(c_float), intent(out) :: out(rows)
  integer(c_int64_t) :: i
  do i = 1, rows
    out(i) = norm2(x(:, i))
  end do
end subroutine
"""


@pytest.mark.skipif(shutil.which("gfortran") is None, reason="there is no Fortran compiler here")
def test_a_function_in_fortran(tmp_path):
    """Fortran counts axes from the other end."""
    source, path = tmp_path / "norms.f90", tmp_path / "libnorms.so"
    source.write_text(FORTRAN)
    subprocess.run(["gfortran", "-O2", "-shared", "-fPIC", source, "-o", path], check=True)
    parameters = ("int64_t x.shape[1]", "int64_t x.shape[0]", "const float* x", "float* out")
    function = CKernel("row_norms", path, parameters, rows="parallel")
    norms = Op("row_norms", kernels={"cpu": function}, reference=lambda x: jnp.sqrt((x * x).sum(-1)))
    x = jnp.arange(1.0, 13.0).reshape(4, 3)
    assert eqxc.testing.check(norms, x, only=["reference", "inputs untouched", "grad", "vmap"]).passed


def test_equal_kernels_are_one():
    assert saxpy() == saxpy()
    assert hash(saxpy()) == hash(saxpy())
    assert saxpy() != dataclasses.replace(saxpy(), status=True)
