"""Kernels in CUDA C++ through the whole lane, on a GPU in software: compiled, checked, launched, and right."""

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from ..gpu.saxpy import SOURCE as SAXPY


def size(x, y, *, a):
    return x.size


def size_backward(grads, args, out, cotangents, *, a):
    return args[0].size


def op(**changed):
    forward = eqxc.CudaKernel(
        SAXPY,
        "saxpy",
        eqxc.Launch(grid=lambda x, y, *, a: -(-x.size // 64), block=64),
        scalars={"n": ("int32", size), "a": "float32"},
        **changed,
    )
    backward = eqxc.CudaKernel(
        SAXPY,
        "gradients",
        eqxc.Launch(grid=lambda grads, args, out, cotangents, *, a: -(-args[0].size // 64), block=64),
        scalars={"n": ("int32", size_backward), "a": "float32"},
    )
    return eqxc.Op(
        "saxpy",
        kernels={"cpu": forward},
        backward={"cpu": backward},
        reference=lambda x, y, *, a: a * x + y,
        vmap_method={"x": "broadcast_all", "y": "broadcast_all"},
    )


@pytest.fixture
def f(software_gpu):
    return functools.partial(op(), a=3.0)


@pytest.fixture
def xy():
    x = jnp.arange(130.0)
    return x, jnp.sin(x)


def test_values(f, xy, software_gpu):
    np.testing.assert_allclose(jax.jit(f)(*xy), 3 * xy[0] + xy[1])
    np.testing.assert_allclose(f(*xy), 3 * xy[0] + xy[1])
    assert len(software_gpu.launches) == 2


def test_geometry_is_tuned(xy, software_gpu):
    """Two kernels of one source: the first has blocks without an element, and each thread takes time here."""
    wasteful, right = (
        eqxc.CudaKernel(
            SAXPY,
            "saxpy",
            eqxc.Launch(grid=blocks, block=64),
            scalars={"n": ("int32", size), "a": "float32"},
        )
        for blocks in (200, 3)
    )
    f = functools.partial(eqxc.Op("saxpy", {"cpu": [wasteful, right]}, lambda x, y, *, a: a * x + y), a=3.0)
    (tuned,) = eqxc.tune(f, *xy)
    assert tuned.winner == 1
    assert "grid=3" in tuned.kernels[1]
    np.testing.assert_allclose(jax.jit(f)(*xy), 3 * xy[0] + xy[1])
    assert "grid=(3,1,1)" in software_gpu.launches[-1]


def test_the_whole_of_check(f, xy, software_gpu):
    report = eqxc.testing.check(op(), *xy, a=3.0)
    assert "ok" in str(report)
    assert len(software_gpu.launches) > 20


def test_gradients_are_the_kernels(f, xy, software_gpu):
    grads = jax.jit(jax.grad(lambda x, y: (f(x, y) ** 2).sum(), (0, 1)))(*xy)
    want = jax.grad(lambda x, y: ((3 * x + y) ** 2).sum(), (0, 1))(*xy)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), grads, want)
    assert any("soft_launch_0" in line and "grid=(3,1,1)" in line for line in software_gpu.launches)
    assert len(software_gpu.launches) == 2


def test_sharded_over_devices(f, xy, mesh, software_gpu):
    spec = jax.sharding.PartitionSpec("d")
    x = jax.device_put(jnp.ones((8, 130)), jax.sharding.NamedSharding(mesh, spec))
    out = jax.jit(jax.vmap(f))(x, x)
    np.testing.assert_allclose(out, 4)
    devices = {line.split("device=")[1].split()[0] for line in software_gpu.launches}
    assert devices == {"0", "1", "2", "3"}
    assert all("grid=(5,1,1)" in line for line in software_gpu.launches)  # 2 of 8 rows each


def test_donated_and_aliased(software_gpu, xy):
    aliased = functools.partial(op(aliases={"y": 0}), a=3.0)
    y = jnp.array(xy[1])
    pointer = y.unsafe_buffer_pointer()
    out = jax.jit(aliased, donate_argnums=1)(xy[0], y)
    assert out.unsafe_buffer_pointer() == pointer
    np.testing.assert_allclose(out, 3 * xy[0] + xy[1])


def test_a_kernel_that_fails_is_a_clear_error(software_gpu, xy):
    source = 'extern "C" __global__ void entry(const float* x, float* out) { out[0] = __shfl_sync(1u, x[0], 0); }'
    wrong = eqxc.Op(
        "wrong",
        kernels={"cpu": eqxc.CudaKernel(source, "entry", eqxc.Launch(1, 32), out_type=lambda x: x)},
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"wrong\[cuda\]: cuLaunchKernel"):
        jax.block_until_ready(jax.jit(lambda x: wrong(x))(xy[0]))


def test_in_a_layer_and_a_training_step(software_gpu):
    import equinox as eqx

    class Saxpy(eqxc.Layer):
        y: jax.Array
        a: float = eqx.field(static=True)
        kernels: ClassVar = {
            "cpu": eqxc.CudaKernel(
                SAXPY.replace("const float* x, const float* y", "const float* y, const float* x"),
                "saxpy",
                eqxc.Launch(grid=lambda self, x: -(-x.size // 64), block=64),
                scalars={"n": ("int32", lambda self, x: x.size), "a": "float32"},
            )
        }
        vmap_method = "fold"

        def reference(self, x):
            return self.a * x + self.y

    layer = Saxpy(jnp.ones(100), 0.5)

    @eqx.filter_jit
    def step(layer, x):
        grads = eqx.filter_grad(lambda layer: (layer(x) ** 2).sum())(layer)
        return eqx.apply_updates(layer, jax.tree.map(lambda g: -0.1 * g, grads))

    x = jnp.zeros(100)
    np.testing.assert_allclose(step(layer, x).y, 0.8)
    assert software_gpu.launches


def test_a_backward_kernel_of_a_layer(software_gpu):
    import equinox as eqx

    def count(layer, *_):
        return layer.y.size

    source = SAXPY.replace("const float* x, const float* y", "const float* y, const float* x").replace(
        "float* dx,\n                                     float* dy", "float* dy, float* dx"
    )

    class Saxpy(eqxc.Layer):
        y: jax.Array
        a: float = eqx.field(static=True)
        vmap_method = "sequential"
        kernels: ClassVar = {
            "cpu": eqxc.CudaKernel(
                source, "saxpy", eqxc.Launch(lambda layer, x: 3, 64), scalars={"n": ("int32", count), "a": "float32"}
            )
        }
        backward_kernels: ClassVar = {
            "cpu": eqxc.CudaKernel(
                source, "gradients", eqxc.Launch(lambda *_: 3, 64), scalars={"n": ("int32", count), "a": "float32"}
            )
        }

        def reference(self, x):
            return self.a * x + self.y

    layer, x = Saxpy(jnp.sin(jnp.arange(130.0)), 0.5), jnp.arange(130.0)
    report = eqxc.testing.check(layer, x, skip=("dtypes", "odd shapes", "zero size"))
    assert report.passed
    software_gpu.reset()
    gradient = eqx.filter_jit(eqx.filter_grad(lambda layer, x: (layer(x) ** 2).sum()))(layer, x)
    np.testing.assert_allclose(gradient.y, 2 * (0.5 * x + layer.y), rtol=1e-6)
    assert len(software_gpu.launches) == 2


# -- absent operands and gradients that are not needed are null pointers

AFFINE = """
extern "C" __global__ void affine(const float* x, const float* weight, const float* bias, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] * (weight ? weight[i] : 1) + (bias ? bias[i] : 0);
}
extern "C" __global__ void gradients(const float* x, const float* weight, const float* bias, const float* out,
                                     const float* ct, float* dx, float* dweight, float* dbias, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  if (dx) dx[i] = ct[i] * (weight ? weight[i] : 1);
  if (dweight) dweight[i] = ct[i] * x[i];
  if (dbias) dbias[i] = ct[i];
}
"""


def affine_reference(x, weight, bias):
    y = x if weight is None else x * weight
    return y if bias is None else y + bias


def kernel_of(entry, count):
    return eqxc.CudaKernel(
        AFFINE, entry, eqxc.Launch(lambda *args: -(-count(*args) // 64), 64), scalars={"n": ("int32", count)}
    )


FORWARD = kernel_of("affine", lambda x, *_: x.size)


@pytest.mark.parametrize("present", [(False, False), (True, False), (False, True), (True, True)], ids=str)
def test_absent_operands_are_null(software_gpu, xy, present):
    needed = []

    def count(grads, args, *_):
        needed.append([grad is not None for grad in grads])
        return args[0].size

    affine = eqxc.Op("affine", {"cpu": FORWARD}, affine_reference, backward={"cpu": kernel_of("gradients", count)})
    args = (xy[0], *(xy[1] + i if there else None for i, there in enumerate(present)))
    np.testing.assert_allclose(jax.jit(affine)(*args), affine_reference(*args), rtol=1e-6)
    for wanted in [
        (0,),
        *((i + 1,) for i in range(2) if present[i]),
        tuple(i for i in range(3) if args[i] is not None),
    ]:
        software_gpu.reset()
        got, want = (
            jax.jit(jax.grad(lambda *args, f=f: (f(*args) ** 2).sum(), wanted))(*args)
            for f in (affine, affine_reference)
        )
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), got, want)
        assert len(software_gpu.launches) == 2
        assert needed[-1] == [i in wanted for i in range(3)]


def test_absent_fields_of_a_layer_are_null(software_gpu, xy):
    class Affine(eqxc.Layer):
        weight: jax.Array
        bias: jax.Array | None
        kernels: ClassVar = {
            "cpu": eqxc.CudaKernel(
                AFFINE.replace(
                    "const float* x, const float* weight, const float* bias",
                    "const float* weight, const float* bias, const float* x",
                ),
                "affine",
                eqxc.Launch(lambda layer, x: -(-x.size // 64), 64),
                scalars={"n": ("int32", lambda layer, x: x.size)},
            )
        }
        vmap_method = "fold"

        def reference(self, x):
            return affine_reference(x, self.weight, self.bias)

    x, y = xy
    np.testing.assert_allclose(jax.jit(lambda x: Affine(y, None)(x))(x), x * y, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(lambda x: Affine(y, y)(x))(x), x * y + y, rtol=1e-6)


def test_a_null_pointer_has_to_be_a_pointer(software_gpu, xy):
    source = AFFINE.replace("const float* bias, float* out", "float bias, float* out")
    kernel = eqxc.CudaKernel(source, "affine", eqxc.Launch(1, 32), scalars={"n": ("int32", lambda x, *_: x.size)})
    wrong = eqxc.Op("wrong", {"cpu": kernel}, affine_reference)
    with pytest.raises(ValueError, match="parameter 3 to be a pointer to anything, for bias"):
        jax.jit(wrong)(xy[0], xy[1], None)


def test_an_argument_that_is_left_out_is_null(software_gpu, xy):
    affine = eqxc.Op("affine", {"cpu": FORWARD}, lambda x, weight=None, bias=None: affine_reference(x, weight, bias))
    x, y = xy
    np.testing.assert_allclose(jax.jit(affine)(x), x)
    np.testing.assert_allclose(jax.jit(affine)(x, y), x * y, rtol=1e-6)
    assert len(software_gpu.launches) == 2
