"""CUDA C++ as it is compiled when a program is lowered, which needs no GPU."""

import pathlib
import subprocess
import sys
from typing import ClassVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback.backends import _cuda, _nvrtc
from eqxcallback.backends._description import description
from eqxcallback.backends._image import kernels_of


SAXPY = """
extern "C" __global__ void saxpy(const float* x, const float* y, float* out, int n, float a) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = a * x[i] + y[i];
}
"""
F32 = jax.ShapeDtypeStruct((1000,), jnp.float32)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("EQXCALLBACK_CACHE_DIR", str(tmp_path / "cache"))
    _cuda.compiled_source.cache_clear()


def saxpy(**changed):
    fields = {
        "source": SAXPY,
        "entry": "saxpy",
        "launch": eqxc.Launch(grid=lambda x, y, *, a: -(-x.size // 256), block=256),
        "scalars": {"n": ("int32", lambda x, y, *, a: x.size), "a": "float32"},
        "out_type": lambda x, y, *, a: x,
    }
    return eqxc.CudaKernel(**{**fields, **changed})


def simple(source, **changed):
    """`entry` of as many operands as it has, and one result."""
    fields = {"entry": "entry", "launch": eqxc.Launch(grid=1, block=32), "out_type": lambda *args, **_: F32}
    return eqxc.CudaKernel(source, **{**fields, **changed})


def lowered(kernel, *args, vmap=False, **options):
    op = eqxc.Op("op", kernels={"cuda": kernel}, vmap_method="fold")

    def f(*args):
        return op(*args, **options)

    return jax.jit(jax.vmap(f) if vmap else f).trace(*args).lower(lowering_platforms=("cuda",))


def attributes(program):
    """Of its one call."""
    (call,) = [op for op in _operations(program.compiler_ir()) if op.name == "stablehlo.custom_call"]
    found = {item.name: item.attr for item in call.attributes["mhlo.backend_config"]}
    arrays = {name: np.array(found[name]) for name in ("geometry", "scalars", "images", "sizes") if name in found}
    return {**{name: found[name].value for name in ("who", "entries")}, **arrays}


def _operations(module):
    for op in module.body.operations:
        for block in op.regions[0]:
            yield from (inner.operation for inner in block)


def test_lowered_for_cuda():
    program = lowered(saxpy(), F32, F32, a=2.0)
    assert "@eqxcallback_launch_captured(" in program.as_text()
    found = attributes(program)
    assert found["entries"] == "saxpy"
    assert found["geometry"].tolist() == [4, 1, 1, 256, 1, 1, 0, 0]
    assert found["scalars"].view("u4").tolist() == [1000, 0, np.float32(2).view("u4"), 0]
    assert found["sizes"].tolist() == [found["images"].size]


def test_geometry_under_vmap():
    batch = jax.ShapeDtypeStruct((3, 1000), jnp.float32)
    found = attributes(lowered(saxpy(), batch, batch, a=2.0, vmap=True))
    assert found["geometry"][0] == 12
    assert found["scalars"][0] == 3000


def test_not_compatible_with_command_buffers():
    assert "@eqxcallback_launch(" in lowered(saxpy(command_buffer_compatible=False), F32, F32, a=2.0).as_text()


def test_aliases_are_in_the_program():
    program = lowered(saxpy(aliases={1: 0}), F32, F32, a=2.0)
    assert "output_operand_alias<output_tuple_indices = [], operand_index = 1" in program.as_text()


def test_workspaces_are_hidden_results():
    source = 'extern "C" __global__ void entry(const float* x, float* out, double* work, int* more) {}'
    work = [jax.ShapeDtypeStruct((7,), jnp.int8), jax.ShapeDtypeStruct((2, 3), jnp.int32)]
    text = lowered(simple(source.replace("double", "char"), workspaces=work), F32).as_text()
    assert "-> (tensor<1000xf32>, tensor<7xi8>, tensor<2x3xi32>)" in text
    assert "return %0#0 : tensor<1000xf32>" in text


def image_of(program):
    return attributes(program)["images"].tobytes()


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


def test_a_scalar_that_nobody_passes():
    with pytest.raises(ValueError, match=r"the scalar n is no option of this call \(there are a\).*scalars=\{'n'"):
        lowered(saxpy(scalars={"n": "int32", "a": "float32"}), F32, F32, a=2.0)


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


def test_both_compilers_make_the_same(monkeypatch, tmp_path):
    pytest.importorskip("cupy", reason="CuPy is not installed")
    images = []
    for technology in (_nvrtc._CuPy, _nvrtc._Library):
        found = technology()
        monkeypatch.setattr(_nvrtc, "find", lambda found=found: found)
        monkeypatch.setenv("EQXCALLBACK_CACHE_DIR", str(tmp_path / technology.__name__))
        images.append(image_of(lowered(saxpy(arch="sm_90"), F32, F32, a=2.0)))
        _cuda.compiled_source.cache_clear()
    kernels = [kernels_of(image) for image in images]
    assert kernels[0] == kernels[1]
    assert kernels[0] is not None


def test_exported_programs_have_their_kernels(tmp_path):
    op = eqxc.Op("op", kernels={"cuda": saxpy(arch="sm_90")})
    exported = eqxc.export(lambda x, y: op(x, y, a=2.0), platforms=["cuda"])(F32, F32)
    (tmp_path / "program").write_bytes(exported.serialize())
    code = f"""
import pathlib, jax, eqxcallback
program = jax.export.deserialize(pathlib.Path({str(tmp_path / "program")!r}).read_bytes())
assert program.platforms == ("cuda",)
assert "eqxcallback_launch_captured" in program.mlir_module()
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=pathlib.Path(__file__).parents[2])


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


def test_kernels_are_equal_by_what_they_are():
    def size(x, y, *, a):
        return x.size

    launch = eqxc.Launch(grid=size, block=256)

    def make(**changed):
        return saxpy(launch=launch, out_type=None, **{"scalars": {"n": ("int32", size), "a": "float32"}, **changed})

    assert make() == make()
    assert hash(make()) == hash(make())
    assert make() != make(scalars={"a": "float32", "n": ("int32", size)})  # the order is that of the parameters
    assert make() != make(options=["-lineinfo"])


def test_in_a_layer():
    import equinox as eqx

    class Saxpy(eqxc.Layer):
        y: jax.Array
        a: float = eqx.field(static=True)
        kernels: ClassVar = {
            "cuda": eqxc.CudaKernel(
                SAXPY.replace("const float* x, const float* y", "const float* y, const float* x"),
                "saxpy",
                eqxc.Launch(grid=lambda self, x: -(-x.size // 256), block=256),
                scalars={"n": ("int32", lambda self, x: x.size), "a": "float32"},
            )
        }
        vmap_method = "fold"

        def reference(self, x):
            return self.a * x + self.y

    layer = Saxpy(jnp.ones(1000), 0.5)
    text = jax.jit(lambda y, x: Saxpy(y, 0.5)(x)).trace(F32, F32).lower(lowering_platforms=("cuda",))
    assert attributes(text)["scalars"].view("u4").tolist() == [1000, 0, np.float32(0.5).view("u4"), 0]
    np.testing.assert_allclose(layer(jnp.ones(1000)), 1.5)  # on a CPU, the reference


def test_a_template_without_its_arguments():
    source = "template <typename T> __global__ void entry(const T* x, T* out) {}"
    with pytest.raises(ValueError, match="a template with its arguments: 'mine::scale<float>'"):
        lowered(simple(source), F32)


def test_a_header_that_is_not_there():
    source = '#include <nowhere.h>\nextern "C" __global__ void entry(const float* x, float* out) {}'
    with pytest.raises(ValueError, match=r"(?s)nowhere\.h.*CUDA's own headers are in the wheels"):
        lowered(simple(source), F32)


def test_a_path_as_a_text():
    with pytest.raises(ValueError, match=r"expected source to be CUDA C\+\+; got 'kernel.cu'. Pass a pathlib.Path"):
        simple("kernel.cu")


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


BLOCKS = 7


def test_kernels_are_described_by_what_their_functions_do():
    """Two that differ in a global, a default or an inner function are two in programs that are split between devices."""
    globals()["BLOCKS"] = 7

    def described(grid):
        return description(saxpy(launch=eqxc.Launch(grid, 32)), "op")

    def make(size=3):
        return lambda x, y, *, a: max(size, *[(lambda: BLOCKS)() for _ in range(1)])

    before = described(make())
    assert described(make()) == before
    assert described(make(size=4)) != before
    globals()["BLOCKS"] = 8
    assert described(make()) != before
    assert description(saxpy(source=SAXPY + "\n"), "op") != description(saxpy(), "op")
