"""Kernels that are compiled already: to cubins and PTX by NVIDIA's compiler, checked and launched as on a GPU. What runs in
their place is the same source, built for the CPU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import xla
from eqxcallback.backends import _image_kernel
from eqxcallback.backends._description import description

from .cuda_programs import attributes
from .images import (
    BIAS,
    ENTRIES,
    FORWARD,
    GRADIENTS,
    SIZES,
    SOURCE,
    X,
    compiled,
    fatbin,
    image_op,
    lowered,
    reference,
    source_op,
)


ROWS = ("inputs untouched", "outputs written", "reference", "vmap", "nested vmap", "grad", "partial grads")
ROWS += ("vmap of grad", "grad of vmap", "odd shapes", "export")


@pytest.fixture(scope="module")
def images():
    """Compiled before a test puts another compiler in NVRTC's place."""
    return {arch: compiled(arch) for arch in ("sm_90", "compute_80")}


@pytest.fixture
def gpu(images, software_gpu):
    for image in images.values():
        software_gpu.stand_in(image, SOURCE, ENTRIES)
    return software_gpu


@pytest.fixture
def x_bias():
    x = jnp.sin(jnp.arange(40.0)).reshape(4, 10)
    return x, jnp.cos(x)


def op_of(kind, images, tmp_path):
    if kind == "source":
        return source_op()
    if kind == "cubin":
        return image_op(images["sm_90"])
    if kind == "text":
        return image_op(images["compute_80"].decode())
    path = tmp_path / "kernels.ptx"
    path.write_bytes(images["compute_80"])
    return image_op(path)


@pytest.mark.parametrize("kind", ["source", "cubin", "text", "file"])
def test_parameters_in_an_order_of_their_own(gpu, images, tmp_path, x_bias, kind):
    """Sizes, strides, a structure by value, numbers, workspaces and null pointers, and the gradients."""
    f = functools.partial(op_of(kind, images, tmp_path), a=3.0)
    want = functools.partial(reference, a=3.0)
    np.testing.assert_allclose(jax.jit(f)(*x_bias), want(*x_bias), rtol=1e-6)
    np.testing.assert_allclose(f(x_bias[0], None), want(x_bias[0], None), rtol=1e-6)
    grads, wanted = (
        jax.jit(jax.grad(lambda x, bias, f=f: (f(x, bias) ** 2).sum(), (0, 1)))(*x_bias) for f in (f, want)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), grads, wanted)
    assert len(gpu.launches) == 4
    assert (GRADIENTS in gpu.launches[-1]) == (kind != "source")


def test_the_rows_of_check(gpu, images, x_bias):
    report = eqxc.testing.check(image_op(images["sm_90"]), *x_bias, a=3.0, only=ROWS)
    assert report.passed
    assert len(gpu.launches) > 20


def test_sharded_over_devices(gpu, images, x_bias, mesh):
    x, bias = x_bias
    rows = jax.device_put(jnp.stack([x] * 8), jax.sharding.NamedSharding(mesh, jax.P("d")))
    f = functools.partial(image_op(images["sm_90"]), a=3.0)
    out = jax.jit(jax.vmap(f, in_axes=(0, None)))(rows, bias)
    np.testing.assert_allclose(out[5], reference(x, bias, a=3.0), rtol=1e-6)
    assert {line.split("device=")[1].split()[0] for line in gpu.launches} == {"0", "1", "2", "3"}


def test_fields_of_a_layer(gpu, images, x_bias):
    import equinox as eqx

    of = {**FORWARD, "parameters": [p.replace("bias", "self.bias") for p in FORWARD["parameters"]]}
    of["launch"] = eqxc.Launch(grid=lambda self, x: -(-x.size // 64), block=64)
    of["scalars"] = {
        "shift": (FORWARD["scalars"]["shift"][0], lambda self, x: (0.25, x.size, True)),
        "period": ("int16", lambda self, x: self.bias.size),
    }
    of["workspaces"] = lambda self, x: [x]

    class Affine(eqxc.Layer):
        bias: jax.Array
        a: float = eqx.field(static=True)
        vmap_method = "sequential"
        kernels = {"cpu": eqxc.ImageKernel(images["sm_90"], "affine", **of)}  # noqa: RUF012

        def reference(self, x):
            return reference(x, self.bias, a=self.a)

    x, bias = x_bias
    np.testing.assert_allclose(jax.jit(lambda x: Affine(bias, 2.0)(x))(x), reference(x, bias, a=2.0), rtol=1e-6)
    assert gpu.launches


def test_a_kernel_that_takes_nothing(driver):
    kernel = eqxc.ImageKernel(
        "\n.version 8.0\n.target sm_80\n.visible .entry nothing() { ret; }\n",
        "nothing",
        eqxc.Launch(1, 32),
        parameters=(),
        out_type=lambda x: x,
    )
    jax.block_until_ready(jax.jit(lambda x: eqxc.Op("op", {"cpu": kernel})(x))(jnp.ones(3)))
    assert len(driver.launches) == 1


# -- what is in a program


def test_what_a_program_has(images):
    program = lowered(images["sm_90"])
    launch = attributes(program)
    assert launch["images"].tobytes() == images["sm_90"]
    assert launch["entries"] == "affine"
    assert "@eqxcallback_launch_captured(" in program.as_text()
    # Of x, bias, out and work, and then of what is not an array.
    assert "order = dense<[2, 4, 5, 0, 6, 7, 3, 1, 8, 9, 10]>" in program.as_text()
    assert "@eqxcallback_launch(" in lowered(images["sm_90"], command_buffer_compatible=False).as_text()


def test_inspect_says_what_is_launched(images):
    f = functools.partial(image_op(images["sm_90"], "cuda"), a=3.0)
    (call,) = eqxc.inspect(f, X, BIAS, platform="cuda").calls
    (launch,) = call.launches
    assert (launch.grid, launch.block) == ((1, 1, 1), (64, 1, 1))
    assert launch.registers is not None
    assert 0 < launch.registers < 64
    f = functools.partial(image_op(images["compute_80"], "cuda"), a=3.0)
    (call,) = eqxc.inspect(f, X, BIAS, platform="cuda").calls
    assert call.launches[0].registers is None


def test_recorded_in_a_plan(images):
    if (reason := xla.deviceless_unavailable()) is not None:
        pytest.skip(reason)
    f = functools.partial(image_op(images["sm_90"], "cuda"), a=3.0)
    inspection = eqxc.inspect(eqxc.jit_captured(lambda x: f(x, None)), X, platform="cuda")
    assert [call.captured for call in inspection.calls] == [True]


def test_what_counts_is_the_content_of_a_file(images, tmp_path):
    path = tmp_path / "kernels"
    path.write_bytes(images["sm_90"])
    kernel = eqxc.ImageKernel(path, "affine", **FORWARD)
    same, other = (eqxc.ImageKernel(images[arch], "affine", **FORWARD) for arch in ("sm_90", "compute_80"))
    again = eqxc.ImageKernel(path, "affine", **FORWARD)
    assert kernel == again != same
    assert hash(kernel) == hash(again)
    before = description(kernel, "op")
    assert before == description(same, "op") != description(other, "op")
    path.write_bytes(images["compute_80"])
    assert description(kernel, "op") == description(other, "op")
    assert attributes(lowered(path))["images"].tobytes() == images["compute_80"]


# -- images of others


def _sizes(code):
    return {name: kernel.parameters for name, kernel in code.kernels.items()}


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a", "sm_120", "compute_80", "compute_90"])
def test_what_an_image_says_of_itself(arch):
    (code,) = _image_kernel._read(compiled(arch))
    assert _sizes(code) == SIZES
    assert code.target == arch.replace("compute", "sm").replace("90a", "90")
    assert code.is_ptx == arch.startswith("compute")


def test_a_fatbin_is_checked_by_all_that_it_has(tmp_path):
    try:
        image = fatbin(tmp_path, "sm_80", "sm_90a", "compute_80")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    codes = list(_image_kernel._read(image))
    assert [str(code) for code in codes] == ["a cubin for sm_80", "a cubin for sm_90a", "PTX for sm_80"]
    assert all(_sizes(code) == SIZES for code in codes)
    assert attributes(lowered(image))["images"].tobytes() == image
    compressed = fatbin(tmp_path, "sm_80", "sm_90a", compress=True)
    with pytest.warns(UserWarning, match=r"affine\[image\]: the fatbin is compressed, so that neither .* are checked"):
        assert attributes(lowered(compressed))["images"].tobytes() == compressed


def test_a_cubin_of_triton(driver, monkeypatch, tmp_path):
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from .triton_twice import twice

    source = ASTSource(twice, {"x": "*fp32", "out": "*fp32", "n": "i32", "BLOCK": "constexpr"}, {"BLOCK": 128})
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True})
    kernel = eqxc.ImageKernel(
        made.asm["cubin"],
        "twice",
        eqxc.Launch(grid=lambda x: -(-x.size // 128), block=32 * made.metadata.num_warps),
        # Two pointers of its own: to scratch memory, and to that of its profiler.
        parameters=("float* x", "float* out", "int x.size", "void* 0", "void* 0"),
        out_type=lambda x: x,
    )
    jax.block_until_ready(jax.jit(lambda x: eqxc.Op("twice", {"cpu": kernel})(x))(jnp.ones(300)))
    assert "cuLaunchKernel twice grid=(3,1,1) block=(128,1,1)" in driver.launches[0]


def test_ptx_of_numba(driver):
    cuda = pytest.importorskip("numba.cuda", reason="Numba is not installed")
    from numba import types

    def twice(x, out):
        i = cuda.grid(1)
        if i < x.size:
            out[i] = 2 * x[i]

    array = types.float32[::1]
    try:
        ptx, _ = cuda.compile_ptx(twice, types.void(array, array), cc=(8, 0))
    except Exception as error:  # Numba's errors of a toolkit that is not there have no base
        pytest.skip(f"Numba does not compile for GPUs here: {error}")
    # Of an array: two pointers of Numba's, the number of elements, their size, a pointer, shape and strides.
    of = [("void* 0", "void* 0", f"{x}.size", "int64_t 4", f"float* {x}", f"{x}.shape[0]", "int64_t 4") for x in "xo"]
    kernel = eqxc.ImageKernel(
        ptx,
        "twice",
        eqxc.Launch(grid=lambda x: -(-x.size // 128), block=128),
        parameters=[text.replace("* o", "* out").replace("o.", "out.") for texts in of for text in texts],
        out_type=lambda x: x,
    )
    jax.block_until_ready(jax.jit(lambda x: eqxc.Op("twice", {"cpu": kernel})(x))(jnp.ones(300)))
    assert "5twice" in driver.launches[0]
    assert "grid=(3,1,1) block=(128,1,1)" in driver.launches[0]
