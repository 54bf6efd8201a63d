"""Kernels for GPUs that `check` runs on a CPU."""

import platform
from typing import Any, ClassVar, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback.backends import _emulated, _nvrtc
from eqxcallback.emulation import _build, _cuda
from eqxcallback.testing import CheckFailed, check, emulated

from .catching import failed_rows


X86 = pytest.mark.skipif(
    platform.machine() not in {"x86_64", "AMD64"}, reason="other processors say which address it was"
)

# y = a * x + weight, where 32 elements at a time go through shared memory; and its gradients. What is shorter than the
# result repeats itself, and what is longer than a gradient is summed: so it is right under `vmap`.
SOURCE = """
extern "C" __global__ void affine(const float* weight, const float* x, float* out, int nx, int nw, int n, float a) {
  extern __shared__ float tile[];
  const int i = blockIdx.x * blockDim.x + threadIdx.x, last = blockDim.x - 1;
  tile[last - threadIdx.x] = i < n ? x[i % nx] : 0;
  __syncthreads();
  if (i < n) out[i] = a * tile[last - threadIdx.x] + weight[i % nw];
}
extern "C" __global__ void gradients(const float* weight, const float* x, const float* out, const float* ct,
                                     float* dweight, float* dx, int nx, int nw, int n, float a) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  float of_x = 0, of_weight = 0;
  if (dx != nullptr && i < nx) {
    for (int j = i; j < n; j += nx) of_x += a * ct[j];
    dx[i] = of_x;
  }
  if (dweight != nullptr && i < nw) {
    for (int j = i; j < n; j += nw) of_weight += ct[j];
    dweight[i] = of_weight;
  }
}
"""


class Affine(eqxc.Layer):
    vmap_method = "fold"
    weight: jax.Array
    a: float = eqx.field(static=True)

    def reference(self, x):
        return self.a * x + self.weight


def kernel(source, entry, sizes, shared_bytes=0):
    """**Arguments:** `sizes`: those of `x` and of the weight, or of their gradients, and of the result."""
    names = ("nx", "nw", "n")
    scalars = {name: ("int32", lambda *args, i=i: sizes(*args)[i]) for i, name in enumerate(names)}
    launch = eqxc.Launch(lambda *args: -(-max(sizes(*args)) // 32), 32, shared_bytes)
    return eqxc.CudaKernel(source, entry, launch, scalars=scalars | {"a": "float32"})


def cuda_kernel(source=SOURCE):
    def sizes(layer, x):
        return x.size, layer.weight.size, max(x.size, layer.weight.size)

    return kernel(source, "affine", sizes, 128)


def affine(source=SOURCE, backward_source=SOURCE):
    def sizes(layer, grads, args, out, cotangents):
        return *(0 if grad is None else grad.size for grad in (grads[1], grads[0].weight)), cotangents.size

    backward = kernel(backward_source, "gradients", sizes)

    class Own(Affine):
        kernels: ClassVar = {"cuda": cuda_kernel(source)}
        backward_kernels: ClassVar = {"cuda": backward}

    Own.__qualname__ = "Own"
    return Own(jnp.sin(jnp.arange(40.0)), 0.5)


X = jnp.linspace(-1, 1, 40)
FEW = ("reference", "vmap", "grad")


def test_a_wrong_kernel_is_found():
    with pytest.raises(CheckFailed) as caught:
        check(affine(SOURCE.replace("out[i] = a", "out[i] = -777")), X, only=("types", *FEW))
    assert [row.name for row in caught.value.report.failed] == ["reference", "vmap"]


def test_a_right_kernel_passes_every_row():
    report = check(affine(), X)
    assert report.passed
    assert report.subject.endswith("its kernels for cuda emulated")
    assert {report[name].result for name in ("inputs untouched", "outputs written", "buffers released", "grad")} == {
        "ok"
    }
    assert report["export"].detail == "an emulated kernel stays in this process"
    assert report["dtypes"].detail == "refused: float16, bfloat16, float64"


def test_a_wrong_backward_kernel_is_found():
    wrong = SOURCE.replace("of_weight += ct[j]", "of_weight = ct[j]")  # of a batch the last one
    assert failed_rows(affine(backward_source=wrong), X, only=("reference", "grad", "grad of vmap")) == ["grad of vmap"]


def test_under_transformations():
    layer, x = emulated(affine()), jnp.stack([X, 2 * X])
    assert isinstance(layer, Affine)
    grads = jax.jit(jax.vmap(jax.grad(lambda x: (layer(x) ** 2).sum())))(x)
    np.testing.assert_allclose(grads, 2 * 0.5 * (0.5 * x + layer.weight[None]), rtol=1e-5)
    assert type(emulated(affine())) is not type(layer)  # of another class
    assert type(emulated(affine_once)) is type(emulated(affine_once))


affine_once = affine()


BEYOND = SOURCE.replace("out[i] = a", "out[n] = a")


def test_an_eager_call_raises_what_the_kernel_raises():
    layer = affine(BEYOND)
    ones = eqxc.CudaKernel(
        'extern "C" __global__ void ones(const float* x, float* out) { out[threadIdx.x + 1] = 1; }',
        "ones",
        eqxc.Launch(1, lambda x: x.size),
    )
    for call in (emulated(layer), emulated(eqxc.Op("ones", {"cuda": ones}, lambda x: jnp.ones_like(x), "fold"))):
        for f, x in ((call, X), (jax.vmap(call), X[None])):
            with pytest.raises(eqxc.KernelError) as caught:
                f(x)
            assert "the kernel writes before or beyond the memory of" in str(caught.value.original)
        with pytest.raises(eqxc.KernelError), eqxc.raising():
            jax.block_until_ready(jax.jit(lambda x, call=call: call(x))(X))


def test_what_has_no_kernel_for_a_gpu():
    with pytest.raises(
        ValueError, match=r"testing\.emulated: expected a layer or an op with a CudaKernel or a TritonKernel"
    ):
        emulated(cast(Any, eqx.nn.Identity()))


# -- what is not run has not passed


def test_without_emulation_nothing_is_run():
    report = check(affine(), X, only=FEW, emulate="never")
    assert not report.passed
    assert report.failed == ()
    assert [row.result for row in report.not_run] == ["not run"] * 3
    assert str(report).startswith("not run: Own of self.weight")
    assert str(report).endswith("not run: there is no kernel for cpu, only for cuda")
    with pytest.raises(ValueError, match="expected emulate to be one of \\('auto', 'never'\\); got 'always'"):
        check(affine(), X, emulate="always")


def test_a_kernel_of_another_kind_is_not_run():
    op = eqxc.Op("other", kernels={"cuda": eqxc.PythonKernel(lambda ctx, out, x: None)}, reference=lambda x: x)
    report = check(op, X, only=FEW)
    assert [row.result for row in report.rows] == ["not run"] * 3


def test_what_was_chosen_is_run():
    op = eqxc.Op("chosen", kernels={"cuda": cuda_kernel()}, reference=lambda x: x).using("reference")
    assert check(op, X, only=FEW).passed


def test_what_the_emulator_has_not():
    ptx = SOURCE.replace("__syncthreads();", 'unsigned lane; asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));')
    report = check(affine(ptx), X, only=FEW)
    assert [row.result for row in report.rows] == ["not run"] * 3
    assert not report.passed
    assert (
        "Own[cuda, emulated]: g++ does not build it for the emulator: source.cu:6: Error: no such instruction"
        in str(report)
    )


def test_without_gpp(monkeypatch):
    def missing():
        raise FileNotFoundError("No such file or directory: 'g++'")

    monkeypatch.setattr(_cuda, "compiler", missing)
    report = check(affine(SOURCE + "// without g++\n"), X, only=FEW)
    assert [row.result for row in report.rows] == ["not run"] * 3
    assert "CUDA C++ is emulated by g++, which cannot be run" in report["grad"].detail
    assert "which cannot be run" in str(eqxc.available_backends()["emulation"])


def test_without_the_headers_of_cuda(monkeypatch):
    monkeypatch.setattr(_build, "cuda_include_dir", lambda: None)
    monkeypatch.setattr(_cuda, "cuda_include_dir", lambda: None)
    monkeypatch.setattr(_nvrtc, "find", lambda: (_ for _ in ()).throw(ImportError()))
    assert check(affine(SOURCE + "// plain\n"), X, only=FEW).passed
    report = check(affine("#include <cuda_fp16.h>\n__device__ __half unused;\n" + SOURCE), X, only=FEW)
    assert "are in eqxcallback[emulate]." in report["reference"].detail


# -- mistakes


def test_a_source_that_is_wrong_fails(monkeypatch):
    def compiled(kernel, call):
        raise ValueError("the source does not compile")

    monkeypatch.setattr(_nvrtc, "find", lambda: None)
    monkeypatch.setattr(_emulated._cuda, "compiled", compiled)
    assert failed_rows(affine(SOURCE.replace("weight[i % nw]", "wait[i]")), X, only=FEW) == list(FEW)


def test_wrong_parameters():
    with pytest.raises(CheckFailed, match="expected affine to have parameter 7 to be float, for a; got another"):
        check(affine(SOURCE.replace("int n, float a", "int n, double a", 1)), X, only="reference")
    with pytest.raises(CheckFailed, match="expected affine to have 7 parameters"):
        check(
            affine(SOURCE.replace(", int n, float a", ", int n", 1).replace("= a *", "= 1 *", 1)), X, only="reference"
        )


def test_a_gradient_that_is_not_needed_is_a_null_pointer():
    with pytest.raises(CheckFailed, match="by a null pointer: what is absent, or a gradient"):
        check(affine(backward_source=SOURCE.replace("float of_x", "dx[0] = 1; float of_x")), X, only="partial grads")


@pytest.mark.parametrize(
    ("element", "error"),
    [
        ("reinterpret_cast<const float*>(1ll << 40)[i]", r"where\s+there\s+is"),
        pytest.param("reinterpret_cast<const float*>(1ull << 63)[i]", r"far\s+from", marks=X86),
        ("vector(weight + 1)", r"the\s+alignment"),
    ],
)
def test_memory_that_is_not_there(element, error):
    function = "__device__ float vector(const float* x) { return reinterpret_cast<const float4*>(x)->w; }\n"
    with pytest.raises(CheckFailed, match=error):
        check(affine(function + SOURCE.replace("weight[i % nw]", element)), X, only="reference")


def test_writes_beyond_the_end():
    with pytest.raises(CheckFailed, match="the kernel writes before or beyond the memory of result"):
        check(affine(SOURCE.replace("if (i < n) out", "out")), X, only=FEW)


def test_writes_to_an_operand():
    with pytest.raises(CheckFailed, match="the kernel writes to x, which is an operand"):
        check(affine(SOURCE.replace("if (i < n) out", "if (i < n) const_cast<float*>(x)[0] = 7, out")), X, only=FEW)


def test_elements_that_are_not_written():
    assert "outputs written" in failed_rows(
        affine(SOURCE.replace("i < n) out", "i < n - 1) out")), X, only="outputs written"
    )


def test_a_missing_barrier():
    others = "tile[threadIdx.x] = x[(blockIdx.x * blockDim.x + last - threadIdx.x) % nx];"
    source = SOURCE.replace("tile[last - threadIdx.x] = i < n ? x[i % nx] : 0;", others)
    assert source != SOURCE
    assert check(affine(source), X, only="reference").passed
    assert failed_rows(affine(source.replace("__syncthreads();", "")), X, only="reference") == ["reference"]


# -- the parts of a declaration


def test_launches_workspaces_aliases_and_absent_operands():
    source = """
    template <bool Twice>
    __global__ void first(float* x, const float* bias, float* out, float* sums, int n) {
      if (threadIdx.x == 0) sums[blockIdx.x] = 0;
      __syncthreads();
      for (int i = threadIdx.x; i < n; i += blockDim.x) atomicAdd(sums + blockIdx.x, x[blockIdx.x * n + i]);
    }
    __global__ void second(float* x, const float* bias, float* out, float* sums, int n) {
      const int i = blockIdx.x * n + threadIdx.x;
      out[i] = x[i] + sums[blockIdx.x] + (bias ? bias[threadIdx.x] : 0);
    }
    """

    def rows(x, bias=None):
        return x.size // x.shape[-1]

    one = eqxc.CudaKernel(
        source,
        "first<true>",
        [eqxc.Launch(rows, 8), eqxc.Launch(rows, lambda x, bias=None: x.shape[-1], entry="second")],
        workspaces=lambda x, bias=None: [jax.ShapeDtypeStruct((rows(x),), np.float32)],
        scalars={"n": ("int32", lambda x, bias=None: x.shape[-1])},
        aliases={"x": 0},
    )

    def reference(x, bias=None):
        y = x + x.sum(-1, keepdims=True)
        return y if bias is None else y + bias[None]

    op = eqxc.Op(
        "sums", kernels={"cuda": one}, reference=reference, vmap_method={"x": "broadcast_all", "bias": "sequential"}
    )
    x = jnp.linspace(0, 1, 12).reshape(3, 4)
    names = ("reference", "aliasing", "vmap", "outputs written", "inputs untouched")
    assert check(op, x, only=names).passed
    assert check(op, x, jnp.arange(4.0), only=names).passed
    wrong = source.replace("sums[blockIdx.x] = 0", "sums[blockIdx.x] = 0, sums[gridDim.x] = 0")
    beyond = eqxc.Op("sums", kernels={"cuda": type(one)(**{**vars(one), "source": wrong})}, reference=reference)
    with pytest.raises(CheckFailed, match="the kernel writes before or beyond the memory of workspace 0"):
        check(beyond, x, only="reference")


def test_a_kernel_for_the_cpu_too():
    class Both(Affine):
        kernels: ClassVar = {"cpu": "on_cpu", "cuda": cuda_kernel(SOURCE.replace("out[i] = a", "out[i] = 2 * a"))}

        def on_cpu(self, ctx, out, x):
            np.asarray(out)[...] = np.float32(self.a) * np.asarray(x) + np.asarray(self.weight)

    layer = Both(jnp.sin(jnp.arange(40.0)), 0.5)
    assert failed_rows(layer, X, only=("types", "reference")) == ["cuda: reference"]
    report = check(layer, X, only=("types", "reference"), emulate="never")
    assert [row.name for row in report.rows] == ["types", "reference"]
    assert report.passed
    with pytest.raises(CheckFailed) as caught:
        check(layer, X, skip=("dtypes", "threads", "vmap of all", "nested vmap", "odd shapes", "scan", "zero size"))
    names = [row.name for row in caught.value.report.rows]
    assert "types" in names
    assert "cuda: vmap" in names
    assert "cuda: types" not in names


def test_a_subclass_with_a_kernel_of_its_own():
    class Own(type(affine(SOURCE.replace("out[i] = a", "out[i] = 2 * a")))):
        def kernel(self, ctx, out, x):
            np.asarray(out)[...] = np.float32(self.a) * np.asarray(x) + np.asarray(self.weight)

    report = check(Own(jnp.sin(jnp.arange(40.0)), 0.5), X, only="reference")
    assert [row.name for row in report.rows] == ["reference"]
    assert report.passed


def test_progress(capfd):
    check(affine(), X, only=("types", "reference"), progress=True)
    assert [line.rpartition(",")[0] for line in capfd.readouterr().err.splitlines()] == [
        "check: types: ok",
        "check: reference: ok",
    ]
    check(affine(), X, only=("types", "reference"))
    assert capfd.readouterr().err == ""
