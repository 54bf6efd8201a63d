"""Addresses of arrays in structures by value, as Warp and others pass arrays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc


ARRAY = np.dtype([("data", "u8"), ("shape", "i4", (2,)), ("gradient", "u8"), ("ndim", "i4")], align=True)
SOURCE = """
struct Array { float* data; int shape[2]; float* gradient; int ndim; };
extern "C" __global__ void scale(Array out, float a, Array x, Array bias) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= x.shape[0] * x.shape[1] || x.ndim != 2 || x.gradient != nullptr) return;
  out.data[i] = a * x.data[i] + (bias.data ? bias.data[i] : 0);
}
"""


def of(name, get):
    def value(*args, a):
        array = get(*args)
        return (name, array.shape, 0, array.ndim) if array is not None else (name, (0, 0), 0, 0)

    return ARRAY, value


KERNEL = eqxc.CudaKernel(
    SOURCE,
    "scale",
    eqxc.Launch(grid=lambda x, bias, *, a: -(-x.size // 32), block=32),
    parameters=("Array out_array", "float a", "Array x_array", "Array bias_array"),
    scalars={
        "x_array": of("x", lambda x, bias: x),
        "bias_array": of("bias", lambda x, bias: bias),
        "out_array": of("out", lambda x, bias: x),
    },
)


def scale(kernel, platform="cpu"):
    return eqxc.Op(
        "scale",
        {platform: kernel},
        lambda x, bias, *, a: a * x + (0 if bias is None else bias),
        vmap_method="sequential",
    )


X = jnp.arange(20.0).reshape(4, 5)


def test_on_the_software_gpu(software_gpu):
    f = jax.jit(lambda x, bias: scale(KERNEL)(x, bias, a=3.0))
    np.testing.assert_array_equal(f(X, X), 4 * X)
    np.testing.assert_array_equal(f(X, None), 3 * X)
    np.testing.assert_array_equal(f(X + 1, None), 3 * X + 3)  # at another address
    assert len(software_gpu.launches) == 3


def test_by_emulation():
    op = eqxc.testing.emulated(scale(KERNEL, "cuda"))
    np.testing.assert_array_equal(op(X, X, a=3.0), 4 * X)
    np.testing.assert_array_equal(op(X, None, a=3.0), 3 * X)


@pytest.mark.parametrize(
    ("dtype", "name", "text"),
    [
        (ARRAY, "y", "x, bias, out; got 'y' for uint64 at 0"),
        ([("data", "i4"), *ARRAY.descr[1:4]], "x", "got 'x' for int32 at 0"),
        (np.dtype([("n", "i4"), ("data", "u8")]), "x", "got 'x' for uint64 at 4"),
    ],
)
def test_addresses_that_are_wrong(compiler, driver, dtype, name, text):
    value = (name, (4, 5), 0, 2) if len(dtype) > 2 else (1, name)
    scalars = {**KERNEL.scalars, "x_array": (np.dtype(dtype), lambda x, bias, *, a: value)}
    f = jax.jit(lambda x: scale(dataclasses.replace(KERNEL, scalars=scalars))(x, None, a=3.0))
    with pytest.raises(
        ValueError, match=rf"scale\[cuda\]: expected the field data of the scalar x_array to be uint64 at a .*{text}"
    ):
        f(X)


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({"order": [-1]}, "expected positions of parameters in a launch"),
        ({"order": [0, 3]}, "a test: a parameter that is not there"),
        ({"addresses": [0]}, "expected a word and a pointer for each address in a launch"),
        ({"addresses": [1, 0]}, "expected addresses among the values in a launch"),
        ({"addresses": [0, 2]}, "a test: an address of no pointer"),
    ],
)
def test_attributes_that_we_do_not_make(driver, attributes, text):
    """As of a program that another version has saved."""
    image = np.frombuffer(b"image 3 of a test", np.uint8)
    given = {
        "who": "a test",
        "entries": "entry",
        "images": image,
        "sizes": np.array([image.size]),
        "geometry": np.array([1, 1, 1, 32, 1, 1, 0, 0]),
        "scalars": np.array([5]),
        **{name: np.array(numbers) for name, numbers in attributes.items()},
    }
    f = jax.jit(lambda x: jax.ffi.ffi_call("eqxcallback_launch", jax.ShapeDtypeStruct((3,), jnp.float32))(x, **given))
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        jax.block_until_ready(f(jnp.ones(3)))
    assert driver.launches == []
