"""If Triton or NVRTC is missing, `implementation="auto"` runs the next kernel, or the reference, and says so."""

import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqxcallback as eqxc
from eqxcallback.backends import _cuda, _nvrtc
from eqxcallback.core import _warnings
from eqxcallback.program import _doctor as doctor


X = jax.ShapeDtypeStruct((96,), jnp.float32)
SOURCE = """
extern "C" __global__ void twice(const float* x, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = 2 * x[i];
}
"""
NO_TRITON = "triton cannot be imported"


@pytest.fixture(autouse=True)
def nothing_was_said():
    _warnings._warn.cache_clear()


@pytest.fixture
def no_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)


@pytest.fixture
def no_nvrtc(monkeypatch):
    def find():
        raise ImportError("there is no NVRTC. Install eqxcallback[cuda13].")

    monkeypatch.setattr(_nvrtc, "find", find)
    _cuda.compiled_source.cache_clear()


def cuda(**changed):
    return eqxc.CudaKernel(
        SOURCE,
        entry="twice",
        launch=eqxc.Launch(grid=1, block=96),
        scalars={"n": ("int32", lambda x: x.size)},
        **changed,
    )


def triton(**changed):
    return eqxc.TritonKernel("a_module_that_is_nowhere:twice", grid=(1,), **changed)


def op_of(*kernels, reference=True):
    return eqxc.Op("twice", {"cuda": kernels}, (lambda x: 2 * x) if reference else None, vmap_method="fold")


def inspected(fn, *args):
    (call,) = eqxc.inspect(fn, *args, platform="cuda").calls
    return call


def lowered(fn, *args):
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_the_next_kernel_runs(no_triton):
    _nvrtc.find()
    call = inspected(op_of(triton(), cuda()), X)
    assert call.lane == "native"
    assert call.passed_over[0][0] == "triton kernel twice"
    assert call.passed_over[0][1].startswith(NO_TRITON)
    assert "Install eqxcallback[triton]." in call.passed_over[0][1]
    with pytest.warns(eqxc.PerformanceWarning, match=f"triton kernels are passed over: {NO_TRITON}"):
        assert "custom_call" in lowered(op_of(triton(), cuda()), X)


def test_the_reference_runs(no_triton, no_nvrtc):
    op = op_of(triton(), cuda())
    call = inspected(op, X)
    assert call.lane == "reference"
    assert NO_TRITON in call.fallback
    assert "cuda kernel twice: there is no NVRTC" in call.fallback
    assert "Install eqxcallback[cuda13]" in str(eqxc.inspect(op, X, platform="cuda"))


def test_it_is_said_once(no_triton):
    def several():
        return [lowered(op_of(triton()), X) for _ in range(3)]

    with pytest.warns(eqxc.PerformanceWarning) as caught:
        assert "custom_call" not in "".join(several())
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_it_is_said_of_a_call_that_was_inspected(no_triton):
    op = op_of(triton())
    eqxc.inspect(op, X, platform="cuda")
    with pytest.warns(eqxc.PerformanceWarning, match="triton kernels are passed over"):
        lowered(op, X)


def test_what_runs_on_a_cpu_asks_for_nothing(no_triton, no_nvrtc):
    op = op_of(triton(), cuda())
    x = jnp.ones(96)
    assert jax.jit(jax.vmap(op))(x[None]).shape == (1, 96)
    assert jax.grad(lambda x: op(x).sum())(x).shape == (96,)


def test_a_kernel_that_does_not_take_the_call_is_not_looked_for(no_triton):
    call = inspected(op_of(triton(supports=lambda types: "it is too small")), X)
    assert call.fallback == "triton kernel twice: it is too small"


def test_what_was_chosen_is_an_error(no_triton, no_nvrtc):
    op = op_of(triton(), cuda())
    with pytest.raises(ValueError, match=r"twice\[triton\].* cannot be imported .*"):
        lowered(op.using("triton"), X)
    with pytest.raises(ValueError, match=r"twice\[cuda\]: the kernel cannot be compiled: there is no NVRTC"):
        lowered(op.using("cuda"), X)


def test_without_a_reference_it_is_an_error(no_nvrtc):
    op = op_of(cuda(out_type=lambda x: x), reference=False)
    message = (
        r"there is no reference.* Of the kernels for cuda, none runs this call \(cuda kernel twice: there is no NVRTC"
    )
    with pytest.raises(ValueError, match=message), pytest.warns(eqxc.PerformanceWarning):
        lowered(op, X)


def test_a_layer(no_nvrtc):
    class Twice(eqxc.Layer):
        kernels = {"cuda": eqxc.CudaKernel(SOURCE, entry="twice", launch=eqxc.Launch(grid=1, block=96))}  # noqa: RUF012

        def reference(self, x):
            return 2 * x

    call = inspected(Twice(), X)
    assert (call.lane, call.fallback.partition(":")[0]) == ("reference", "cuda kernel twice")


def test_attention_of_a_fused_model(no_triton):
    x = jnp.ones((11, 44))
    attention, _ = eqxc.fuse(eqx.nn.MultiheadAttention(4, 44, key=jax.random.key(0)))
    loss = jax.grad(lambda x: attention(x, x, x).sum())
    with pytest.warns(eqxc.PerformanceWarning, match="triton kernels are passed over"):
        lowered(loss, x)
    calls = eqxc.inspect(loss, x, platform="cuda").calls
    assert [call.lane for call in calls if call.op == "attention"] == ["jax"] * 2
    explicit = eqxc.nn.MultiheadAttention(4, 44, implementation="triton", key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"attention\[triton\]: .*triton"):
        lowered(lambda x: explicit(x, x, x), x)


def test_the_doctor(no_triton, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "CHECKS", {})
    doctor.doctor()
    out = capsys.readouterr().out
    assert 'implementation="auto" runs other kernels, or references, in place of those in triton' in out
    assert "in place of those in python" not in out


def test_a_program_on_a_cpu_imports_neither():
    code = """
import sys, jax, jax.numpy as jnp, eqxcallback as eqxc
x = jnp.ones((4, 2, 8))
jax.jit(jax.grad(lambda x: eqxc.ops.attention(x, x, x).sum()))(x)
eqxc.ops.attention(x, x, x, window=3, implementation="python")
print([name for name in ("triton", "cupy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "[]"
