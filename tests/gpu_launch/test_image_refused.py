"""Images, and parameters of kernels, that are wrong: refused before anything runs."""

import dataclasses
import functools
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import xla
from eqxcallback.backends import _nvrtc

from .images import FORWARD, SOURCE, X, compiled, fatbin, image_op, lowered, op


@pytest.fixture(params=["sm_90", "compute_80"])
def image(request):
    return compiled(request.param)


def refused(image, text, **changed):
    with pytest.raises(ValueError, match=rf"affine\[image\]: {text}"):
        lowered(image, **changed)


def fatbin_of(image, header=64):
    """One entry: a cubin for `sm_90`."""
    entry = struct.pack("<HxxIQIxxxxxxxxIxxxxxxxxQ", 2, header, len(image), 0, 90, 0).ljust(64, b"\0") + image
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entry)) + entry


@pytest.mark.parametrize(
    ("image", "text"),
    [
        (
            b"\x7fELF" + bytes(60),
            r"got 64 bytes that begin with b'\\x7fELF.*. Make one with nvcc -ptx, -cubin or -fatbin",
        ),
        (
            b"extern __global__",
            "expected image to be PTX, a cubin or a fatbin; got 17 bytes that begin with b'extern __glo'",
        ),
        (
            fatbin_of(b"", header=0),
            "a whole image; got 80 bytes that cannot be read .an entry that is less than its own header",
        ),
        (fatbin_of(fatbin_of(b"")), "a whole image; got 160 bytes that cannot be read .a fatbin in a fatbin"),
        (b"", "expected image to be PTX, a cubin or a fatbin; got 0 bytes"),
        (
            ".version 8.0\n.visible .entry affine()",
            "a whole image; got 37 bytes that cannot be read .PTX without a .target",
        ),
    ],
)
def test_what_is_no_image(image, text):
    refused(image, f".*{text}")


def test_an_image_that_is_cut_off(tmp_path):
    refused(compiled("sm_90")[:2000], "expected a whole image; got 2000 bytes that cannot be read")
    with pytest.raises(ValueError, match=r"the image .*nowhere cannot be read"):
        lowered(tmp_path / "nowhere")


def test_a_kernel_that_is_not_there(image):
    what = "(PTX for sm_80|a cubin for sm_90)"
    f = functools.partial(op(eqxc.ImageKernel(image, "wrong", **FORWARD), platform="cuda"), a=3.0)
    with pytest.raises(ValueError, match=rf"expected a kernel wrong in the image, {what}; there are .*_Z9gradients"):
        jax.jit(lambda x: f(x, None)).trace(jnp.ones((2, 3))).lower(lowering_platforms=("cuda",))


def test_two_kernels_of_one_name():
    ptx = "\n.version 8.0\n.target sm_80\n" + "".join(f".entry _Z4same{kind}(){{}}\n" for kind in "if")
    kernel = eqxc.ImageKernel(ptx, "same", eqxc.Launch(1, 32), out_type=lambda: jax.ShapeDtypeStruct((3,), "float32"))
    f = eqxc.Op("op", {"cuda": kernel})
    with pytest.raises(ValueError, match=r"expected one kernel same in the image, .*; there are _Z4samei, _Z4samef"):
        jax.jit(f).trace().lower(lowering_platforms=("cuda",))


def test_parameters_of_other_sizes(image):
    parameters = list(FORWARD["parameters"])
    got = r"got parameters of \(8, 8, 24, 8, 4, 4, 8, 8, 2, 8, 8\) bytes"
    parameters[4] = "int64_t x.strides[-2]"
    refused(
        image,
        rf"expected affine to have the parameters \(out of 8 bytes, .*, x.strides\[-2\] of 8 bytes, .*\), which .*; {got}",
        parameters=parameters,
    )
    refused(image, rf"expected affine to have the parameters .*; {got}", parameters=FORWARD["parameters"][:-1])
    smaller = (np.dtype([("scale", "f4"), ("count", "i8")], align=True), lambda x, bias, *, a: (0.25, x.size))
    refused(image, "expected affine .*, shift of 16 bytes", scalars={**FORWARD["scalars"], "shift": smaller})
    refused(image, "expected affine to have the parameters .x of 8 bytes, bias of 8 bytes, result of", parameters=None)


@pytest.mark.parametrize(
    ("index", "changed", "text"),
    [
        (0, "float* y", "'y' to be a number, an array of the call .x, bias, out, workspace.0.., its size"),
        (0, "__half* out", "expected an array of that type; got the dtype float32 of out"),
        (
            0,
            "float4* out",
            "expected a type of C, without typedefs of your own; got 'float4'.*__nv_bfloat16.*Or leave it",
        ),
        (0, "float out", "expected a pointer, as out is an array"),
        (1, "long long x.shape[3]", r"x has the shape \(4, 10\) in this call"),
        (5, "int a", "expected a number that fits int; got 3.0"),
        (8, "int period", "expected the type that scalars says, int16. Leave it out, or change one of them"),
        (8, "short* period", "expected a value and no pointer, as period is one of scalars"),
        (10, "void* 1", "expected a type of numbers, as 1 is one"),
    ],
)
def test_parameters_that_are_wrong(index, changed, text):
    parameters = [*FORWARD["parameters"][:index], changed, *FORWARD["parameters"][index + 1 :]]
    of_source = op(eqxc.CudaKernel(SOURCE, "affine", **{**FORWARD, "parameters": parameters}), platform="cuda")
    of_image = image_op(compiled("sm_90"), "cuda", parameters=parameters)
    for kind, op_of_kind in (("image", of_image), ("cuda", of_source)):
        f = functools.partial(op_of_kind, a=3.0)
        with pytest.raises(ValueError, match=rf"affine\[{kind}\]: the parameter .*: .*{text}"):
            jax.jit(f).trace(X, X).lower(lowering_platforms=("cuda",))


def test_a_source_whose_parameters_are_in_another_order():
    parameters = [FORWARD["parameters"][i] for i in (0, 1, 3, 2, *range(4, 11))]
    kernel = eqxc.CudaKernel(SOURCE, "affine", **{**FORWARD, "parameters": parameters})
    f = functools.partial(op(kernel, platform="cuda"), a=3.0)
    text = r"expected affine to have parameter 3 to be a pointer to float, for x; got 11 parameters .* or that of `parameters`"
    with pytest.raises(ValueError, match=text):
        jax.jit(f).trace(X, X).lower(lowering_platforms=("cuda",))


# -- architectures


@pytest.mark.parametrize(
    ("archs", "devices", "text"),
    [
        (["sm_80"], [80, 86], None),
        (
            ["sm_80"],
            [90],
            "runs on sm_90; got a cubin for sm_80. Compile it for sm_90, to PTX for an older architecture",
        ),
        (["sm_86"], [80], "runs on sm_80; got a cubin for sm_86"),
        (["compute_80"], [80, 90, 120], None),
        (["compute_90"], [80], "runs on sm_80; got PTX for sm_90"),
        (["compute_90a"], [90], None),
        (["compute_90a"], [100], "runs on sm_100; got PTX for sm_90a"),
        (["compute_100f"], [103], None),
        (["compute_100f"], [120], "runs on sm_120; got PTX for sm_100f"),
        (["sm_80", "sm_90"], [86, 90], None),
        (["sm_80", "sm_90"], [100], "runs on sm_100; got a cubin for sm_80 and a cubin for sm_90"),
    ],
)
def test_devices_that_an_image_is_for(archs, devices, text, monkeypatch, tmp_path):
    try:
        image = compiled(*archs) if len(archs) == 1 else fatbin(tmp_path, *archs)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(xla, "compute_capabilities", lambda: devices)
    if text is None:
        lowered(image)
    else:
        refused(image, f"expected an image that {text}")


def test_the_environment_says_what_a_program_is_for(monkeypatch):
    monkeypatch.setattr(xla, "compute_capabilities", lambda: [80])
    monkeypatch.setenv("EQXCALLBACK_CUDA_ARCH", "sm_90")
    lowered(compiled("sm_90"))
    refused(compiled("sm_80"), "expected an image that runs on sm_90; got a cubin for sm_80")
    monkeypatch.setenv("EQXCALLBACK_CUDA_ARCH", "compute_80")  # PTX, for any device
    lowered(compiled("sm_90"))


def test_a_cluster_on_an_old_architecture():
    launch = eqxc.Launch(grid=2, block=64, cluster=2)
    refused(compiled("sm_80"), "expected arch to be sm_90 or newer, for clusters, .*; got sm_80", launch=launch)
    lowered(compiled("sm_90"), launch=launch)
    lowered(compiled("compute_80"), launch=launch)  # what the driver compiles it for has clusters, perhaps


# -- blocks

BOUNDED = """
extern "C" __global__ void __launch_bounds__(96) bounded(float* out) { out[threadIdx.x] = 1; }
extern "C" __global__ void __block_size__((64, 2, 1)) sized(float* out) { out[threadIdx.x] = 1; }
"""


@pytest.mark.parametrize("kind", ["source", "sm_90", "compute_90"])
@pytest.mark.parametrize(
    ("entry", "block", "text"),
    [
        ("bounded", 96, None),
        ("bounded", (4, 8, 3), None),
        ("bounded", 97, r"to have at most the 96 threads that bounded is compiled for .*; got \(97, 1, 1\)"),
        ("sized", (64, 2), None),
        ("sized", 128, r"to be \(64, 2, 1\), which sized requires .*; got \(128, 1, 1\)"),
        ("sized", 32, r"to be \(64, 2, 1\), which sized requires .*; got \(32, 1, 1\)"),
    ],
)
def test_blocks_that_a_kernel_is_not_compiled_for(kind, entry, block, text):
    out, launch = jax.ShapeDtypeStruct((128,), "float32"), eqxc.Launch(1, block)
    if kind == "source":
        kernel = eqxc.CudaKernel(BOUNDED, entry, launch, arch="sm_90", out_type=lambda: out)
    else:
        image, _, _ = _nvrtc.find().compile(
            BOUNDED, "bounded.cu", (f"--gpu-architecture={kind}",), ("bounded", "sized"), kind.startswith("sm")
        )
        kernel = eqxc.ImageKernel(image, entry, launch, out_type=lambda: out)
    traced = jax.jit(eqxc.Op("op", {"cuda": kernel})).trace()
    if text is None:
        traced.lower(lowering_platforms=("cuda",))
        return
    with pytest.raises(ValueError, match=rf"op\[(cuda|image)\]: expected block {text}"):
        traced.lower(lowering_platforms=("cuda",))


# -- declarations


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        (
            {"image": "kernel.ptx"},
            ValueError,
            r"ImageKernel\(affine\): expected image to be PTX; got .* Pass a pathlib.Path",
        ),
        ({"image": 3}, TypeError, r"ImageKernel\(affine\): expected image to be bytes, PTX or a path; got 3"),
        ({"entry": 3}, TypeError, "ImageKernel: expected entry to be the name of a function; got 3"),
        ({"launch": 3}, TypeError, "expected launch to be a Launch, or several; got 3"),
        ({"parameters": "x"}, TypeError, "expected parameters to be a tuple of texts; got 'x'"),
        ({"parameters": ("x",)}, ValueError, "expected each of scalars to be among parameters; got 'shift', which"),
        ({"scalars": {"n": "int4"}}, TypeError, "expected scalars to be"),
    ],
)
def test_wrong_declarations(changed, error, text):
    with pytest.raises(error, match=text):
        eqxc.ImageKernel(**{"image": b"", "entry": "affine", **FORWARD, **changed})


def test_the_other_platforms():
    f = functools.partial(image_op(compiled("sm_90"), "rocm"), a=3.0)
    with pytest.raises(ValueError, match=r"affine\[image\]: expected the platform cuda; got rocm"):
        jax.jit(lambda x: f(x, None)).trace(jnp.ones((2, 3))).lower(lowering_platforms=("rocm",))


def test_an_image_is_not_emulated():
    of_image, x = image_op(compiled("sm_90"), "cuda"), jnp.ones((4, 10))
    report = eqxc.testing.check(of_image, x, x, a=3.0)
    assert not report.passed
    assert {row.result for row in report.rows} == {"not run"}
    assert "only for cuda. An ImageKernel has no source to emulate: check it on a GPU" in report["grad"].detail
    with pytest.raises(
        ValueError, match=r"with a CudaKernel or a TritonKernel for cuda; got .* has no source to emulate"
    ):
        eqxc.testing.emulated(of_image)
    mixed = dataclasses.replace(of_image, kernels={"cuda": eqxc.CudaKernel(SOURCE, "affine", **FORWARD)})
    report = eqxc.testing.check(mixed, x, x, a=3.0, only=("reference", "grad"))
    assert report.passed
    assert "emulated but for the gradients' image" in report.subject
