"""CUDA C++ is compiled when a program is lowered: for which GPU, with which headers, and once."""

import jax
import ml_dtypes
import pytest

import eqxcallback as eqxc
from eqxcallback.backends import _cuda, _nvrtc
from eqxcallback.backends._image import kernels_of

from .cuda_programs import F32, image_of, lowered, saxpy, simple


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_90a"])
def test_an_architecture_by_name(arch):
    image = image_of(lowered(saxpy(arch=arch), F32, F32, a=2.0))
    assert image[:4] == b"\x7fELF"
    kernels = kernels_of(image)
    assert kernels is not None
    assert kernels["saxpy"].parameters == (8, 8, 8, 4, 4)
    assert 0 < kernels["saxpy"].registers < 32
    assert kernels["saxpy"].stack_bytes == 0


def test_without_a_device_it_is_ptx():
    assert b".target sm_80" in image_of(lowered(saxpy(), F32, F32, a=2.0))


def test_the_environment_names_an_architecture(monkeypatch):
    monkeypatch.setenv("EQXCALLBACK_CUDA_ARCH", "compute_90")
    assert b".target sm_90" in image_of(lowered(saxpy(), F32, F32, a=2.0))


def test_a_device_newer_than_the_compiler_gets_ptx():
    image = image_of(lowered(saxpy(arch="sm_999"), F32, F32, a=2.0))
    assert f".target sm_{max(_nvrtc.find().archs)}".encode() in image


def test_a_device_between_two_that_the_compiler_knows_gets_ptx_of_the_older(monkeypatch):
    """NVRTC 12.8 knows `sm_120`, and refuses `sm_103`."""
    monkeypatch.setattr(_nvrtc.find(), "archs", (80, 90, 100, 120))
    assert b".target sm_100" in image_of(lowered(saxpy(arch="sm_103"), F32, F32, a=2.0))


def test_a_generic_lambda_needs_no_annotation():
    """Compilers before 13.2 took it for a function of the host."""
    body = "auto twice = [=](auto i) { return 2 * x[i]; }; out[threadIdx.x] = twice(threadIdx.x);"
    source = f'extern "C" __global__ void entry(const float* x, float* out) {{ {body} }}'
    assert b".entry entry" in image_of(lowered(simple(source), F32))


DTYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16"]
DTYPES += ["float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_templates_and_dtypes(dtype):
    source = """
    #include <cuda_bf16.h>
    #include <cuda_fp16.h>
    #include <cuda_fp8.h>
    namespace mine { template <typename T, int N> __global__ void copy(const T* x, T* out) { out[N] = x[N]; } }
    """
    entry = lambda x: f"mine::copy<{eqxc.CudaKernel.ctype(x.dtype)}, 3>"
    kernel = simple(source, entry=entry, out_type=lambda x: x, arch="sm_90")
    with jax.enable_x64(True):
        x = jax.ShapeDtypeStruct((1000,), dtype)
        kernels = kernels_of(image_of(lowered(kernel, x)))
    assert kernels is not None
    assert [kernel.parameters for kernel in kernels.values()] == [(8, 8)]


def test_a_dtype_that_cuda_has_no_name_for():
    with pytest.raises(ValueError, match="no type of CUDA C\\+\\+ for int4; there is one for bool, int8"):
        eqxc.CudaKernel.ctype(ml_dtypes.int4)


def test_the_users_lines_are_in_an_error():
    source = 'extern "C" __global__ void entry(const float* x, float* out) {\n  out[0] = misspelled;\n}'
    with pytest.raises(ValueError, match=r"(?s)op\[cuda\]: the source does not compile for compute_80:") as error:
        lowered(simple(source), F32)
    assert 'source.cu(2): error: identifier "misspelled" is undefined' in str(error.value)
    assert "out[0] = misspelled;" in str(error.value)


def test_an_entry_that_is_not_there():
    with pytest.raises(ValueError, match=r"the source has no kernel that can be called wrong\. Name a `__global__`"):
        lowered(saxpy(entry="wrong"), F32, F32, a=2.0)


def test_source_in_files(tmp_path):
    (tmp_path / "common.cuh").write_text("#pragma once\n__device__ float twice(float x) { return 2 * x; }\n")
    (tmp_path / "other.cuh").write_text('#include "common.cuh"\n')
    file = tmp_path / "mine.cu"
    body = 'extern "C" __global__ void entry(const float* x, float* out) {\n  out[0] = twice(x[0]);\n}\n'
    file.write_text('#include "common.cuh"\n#include "other.cuh"\n' + body)
    before = image_of(lowered(simple(file, arch="sm_90"), F32))
    # What is included is part of what it is.
    (tmp_path / "common.cuh").write_text("#pragma once\n__device__ float twice(float x) { return x * x * x; }\n")
    assert image_of(lowered(simple(file, arch="sm_90"), F32)) != before
    file.write_text('#include "common.cuh"\n#include "other.cuh"\n' + body.replace("twice", "thrice"))
    with pytest.raises(ValueError, match=r"mine.cu\(4\): error"):
        lowered(simple(file), F32)
    (tmp_path / "common.cuh").write_text("#pragma once\n\nwrong;\n")
    with pytest.raises(ValueError, match=r"common.cuh\(3\): error"):
        lowered(simple(file), F32)


@pytest.mark.parametrize("option", ["-I{}", "--include-path={}"])
def test_headers_in_a_folder_of_the_options(tmp_path, option):
    header = tmp_path / "common.cuh"
    source = '#include <common.cuh>\nextern "C" __global__ void entry(const float* x, float* out) { out[0] = FACTOR * x[0]; }'
    images = []
    for factor in (2, 3, 2):
        header.write_text(f"#define FACTOR {factor}\n")
        images.append(image_of(lowered(simple(source, arch="sm_90", options=(option.format(tmp_path),)), F32)))
    assert images[0] == images[2] != images[1]


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"the source .*none\.cu cannot be read"):
        lowered(simple(tmp_path / "none.cu"), F32)


def test_the_disk_cache(monkeypatch, tmp_path):
    first = image_of(lowered(saxpy(), F32, F32, a=2.0))
    _cuda.compiled_source.cache_clear()

    class Broken:
        version, archs = _nvrtc.find().version, _nvrtc.find().archs

    monkeypatch.setattr(_nvrtc, "find", lambda: Broken)
    assert image_of(lowered(saxpy(), F32, F32, a=2.0)) == first
    _cuda.compiled_source.cache_clear()
    (file,) = (tmp_path / "cache").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(AttributeError, match="compile"):  # what is not whole is not there
        lowered(saxpy(), F32, F32, a=2.0)


def test_a_cache_that_cannot_be_written(monkeypatch):
    monkeypatch.setenv("EQXCALLBACK_CACHE_DIR", "/proc/nowhere")
    lowered(saxpy(), F32, F32, a=2.0)


@pytest.mark.parametrize("own_cache", ["nvrtc"], indirect=True)
def test_both_compilers_make_the_same(monkeypatch, tmp_path):
    pytest.importorskip("cupy", reason="CuPy is not installed")
    images = []
    for technology in (_nvrtc._CuPy, _nvrtc._Library):
        compiler = technology()
        monkeypatch.setattr(_nvrtc, "find", lambda compiler=compiler: compiler)
        monkeypatch.setenv("EQXCALLBACK_CACHE_DIR", str(tmp_path / technology.__name__))
        images.append(image_of(lowered(saxpy(arch="sm_90"), F32, F32, a=2.0)))
        _cuda.compiled_source.cache_clear()
    assert images[0] == images[1]
    assert kernels_of(images[0]) is not None


def test_a_template_without_its_arguments():
    source = "template <typename T> __global__ void entry(const T* x, T* out) {}"
    with pytest.raises(ValueError, match="a template with its arguments: 'mine::scale<float>'"):
        lowered(simple(source), F32)


def test_a_header_that_is_not_there():
    source = '#include <nowhere.h>\nextern "C" __global__ void entry(const float* x, float* out) {}'
    with pytest.raises(ValueError, match=r"(?s)nowhere\.h.*CUDA's own headers are in the wheels"):
        lowered(simple(source), F32)


@pytest.mark.parametrize(
    "header", ["mma.h", "cooperative_groups.h", "cub/block/block_reduce.cuh", "cuda/std/type_traits"]
)
def test_headers_that_are_in_wheels_of_their_own(header):
    source = f'#include <{header}>\nextern "C" __global__ void entry(const float* x, float* out) {{}}'
    lowered(simple(source, arch="sm_90"), F32)


def test_a_path_as_a_text():
    with pytest.raises(ValueError, match=r"expected source to be CUDA C\+\+; got 'kernel.cu'. Pass a pathlib.Path"):
        simple("kernel.cu")
