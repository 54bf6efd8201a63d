"""Ops under JAX's switches for debugging, weak types, and programs that leave the process."""

import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc


ADD = eqxc.Op("add", kernels={}, reference=lambda x, y: x + y)


@pytest.mark.filterwarnings("ignore:.*de-optimized.*")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_debug_nans(wrap):
    norm = wrap(lambda x: eqxc.ops.rms_norm(x, eps=0.0))
    with jax.debug_nans(True):
        np.testing.assert_array_equal(norm(jnp.ones(4)), 1)
        with pytest.raises(FloatingPointError, match=r"invalid value \(nan\) encountered in"):
            norm(jnp.zeros(4))
    assert np.isnan(norm(jnp.zeros(4))).all()


def test_debug_nans_names_the_op():
    with (
        jax.debug_nans(True),
        pytest.raises(FloatingPointError, match=r"encountered in rms_norm\(center=False, eps=0.0\)"),
    ):
        eqxc.ops.rms_norm(jnp.zeros(4), eps=0.0)


def test_disable_jit():
    with jax.disable_jit():
        np.testing.assert_allclose(eqxc.ops.rms_norm(jnp.full(4, 3.0)), 1, rtol=1e-5)


@pytest.mark.parametrize("y", [1.0, jnp.asarray(1.0)])
def test_weakly_typed_operands_have_their_own_dtype(y):
    x = jnp.ones(3)
    for add in (ADD, jax.jit(ADD), jax.vmap(ADD, in_axes=(0, None))):
        out = add(x, y)
        assert (out.dtype, out.weak_type) == (jnp.float32, False)
        np.testing.assert_array_equal(out, 2)
    with jax.numpy_dtype_promotion("standard"):
        half = jnp.ones(3, jnp.bfloat16)
        np.testing.assert_array_equal(ADD(half, y), jax.jit(ADD)(half, y))
        assert ADD(half, y).dtype == jnp.float32


def test_declarations_are_copied():
    kernels = {"cpu": eqxc.NativeKernel("norm", attributes=("eps", "center", "present"))}
    op = eqxc.Op("norm", kernels=kernels, reference=lambda x, **_: x, vmap_method="sequential")
    kernels.clear()
    np.testing.assert_allclose(
        op(jnp.full(4, 3.0), eps=1e-5, center=False), 1, rtol=1e-5
    )  # the kernel: the reference is the identity


def test_the_order_of_a_mapping_is_nothing():
    def f(x, y):
        return x, y

    def kernel(aliases):
        return eqxc.NativeKernel("f", library="/tmp/f.so", aliases=aliases)

    a, b = kernel({"x": 0, "y": 1}), kernel({"y": 1, "x": 0})
    assert (a, hash(a)) == (b, hash(b))
    a, b = (
        eqxc.Op("f", kernels={"cpu": a, "cuda": b}, reference=f),
        eqxc.Op("f", kernels={"cuda": b, "cpu": a}, reference=f),
    )
    assert (a, hash(a)) == (b, hash(b))


def test_a_reference_that_cannot_be_hashed():
    class Unhashable:
        __hash__ = None  # pyright: ignore

        def __call__(self, x):
            return x

    with pytest.raises(
        TypeError, match=r"Op\(f\): expected reference and out_type to be hashable, as functions are; got"
    ):
        eqxc.Op("f", kernels={}, reference=Unhashable())
    with pytest.raises(TypeError, match=r"Op\(f\): expected kernels to be a mapping from platforms to kernels; got"):
        eqxc.Op("f", kernels=eqxc.NativeKernel("f"), reference=lambda x: x)  # pyright: ignore


@pytest.mark.parametrize("value", [np.float16(1), np.complex64(1), np.uint64(2**63), 1j, None, [1]])
def test_options_that_no_attribute_can_be(value):
    op = eqxc.Op("f", kernels={"cpu": eqxc.NativeKernel("norm")}, reference=lambda x, *, a: x)
    with pytest.raises(TypeError, match=r"option a|the option a is"):
        jax.jit(lambda x: op(x, a=value)).lower(jnp.ones(3))


def test_an_exported_program_runs_where_only_the_package_was_imported(tmp_path):
    from jax import export

    checks = [export.DisabledSafetyCheck.custom_call("eqxcallback_norm")]
    exported = export.export(jax.jit(eqxc.ops.rms_norm), disabled_checks=checks)(
        jax.ShapeDtypeStruct((4,), jnp.float32)
    )
    path = tmp_path / "program"
    path.write_bytes(exported.serialize())
    code = (
        "import pathlib, sys, jax, jax.numpy as jnp, eqxcallback; "
        "program = jax.export.deserialize(bytearray(pathlib.Path(sys.argv[1]).read_bytes())); "
        "print(program.call(jnp.full(4, 3.0)).round(3).tolist())"
    )
    code = code.replace("import pathlib, sys, jax,", "import pathlib, sys, jax, jax.export,")
    result = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, cwd=pathlib.Path("/")
    )
    assert result.stdout == "[1.0, 1.0, 1.0, 1.0]\n", result.stderr
