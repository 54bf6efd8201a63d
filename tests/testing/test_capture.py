"""Mistakes of a kernel while it is recorded are named: on a driver without a GPU, which refuses what CUDA's refuses."""

import ctypes
import re
import subprocess
import types
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import debug, xla
from eqxcallback.testing import CheckFailed, _rows_capture, check
from eqxcallback.testing._check import ROWS

from ..software_gpu.driver import Driver
from .layers import normal
from .tiny_gpu import LEGACY, OTHER, Copy, WithBackward, gpu


@pytest.fixture
def driver(monkeypatch):
    if _rows_capture.on_gpu():
        pytest.skip("programs have to run on a CPU, whose memory the fake driver can use: set JAX_PLATFORMS=cpu")
    fake = Driver()
    monkeypatch.setattr(gpu, "library", fake.library)
    monkeypatch.setattr(_rows_capture, "on_gpu", lambda: True)
    yield fake
    assert fake.num_graphs == 0
    fake.reset()
    xla.launch_with("")


def row(layer, *args, **options):
    return check(layer, *args, only="capture", **options)["capture"]


def failed(layer, *args, **options):
    with pytest.raises(CheckFailed) as caught:
        check(layer, *args, only="capture", **options)
    return caught.value.report["capture"].detail


X = normal(1, 3)


@pytest.mark.parametrize(("layer", "count"), [(Copy(), 2), (WithBackward(), 6)], ids=["forward", "backward"])
def test_a_kernel_that_can_be_recorded(driver, layer, count):
    outcome = row(layer, X)
    assert (outcome.result, outcome.detail, outcome.worst_error) == ("ok", f"recorded {count} copies", 0)
    assert sum("cuGraphLaunch 1 nodes" in line for line in driver.log) == count


def test_what_a_kernel_is_given_while_it_is_recorded(driver):
    seen = []

    class Seen(Copy):
        def launch(self, ctx, out, x):
            seen.append((ctx.platform, ctx.stream == ctx.__cuda_stream__()[1], x.writeable, out.writeable, x.shape))
            seen.append(out.__cuda_array_interface__["stream"] is None)
            kept.append(out)
            super().launch(ctx, out, x)

    kept = []
    row(Seen(), X)
    assert seen == [("cuda", True, False, True, (3,)), True, ("cuda", True, False, True, (3, 3)), True]
    with pytest.raises(RuntimeError, match="after its kernel returned"):
        kept[0].shape  # noqa: B018


class ColumnMajor(Copy):
    input_layouts = ((1, 0),)
    output_layouts = ((1, 0),)

    def launch(self, ctx, out, x):
        assert x.strides[-2:] == out.strides[-2:] == (4, 8)
        super().launch(ctx, out, x)


def test_layouts(driver):
    assert row(ColumnMajor(), normal(1, 2, 3)).detail == "recorded 2 copies"


# Sins.


class Elsewhere(Copy):
    def launch(self, ctx, out, x):
        gpu.copy(out, x, OTHER)


class PartlyElsewhere(Copy):
    def launch(self, ctx, out, x):
        gpu.fill(out, 0, ctx.stream)
        gpu.copy(out, x, OTHER)


class OnTheDefaultStream(Copy):
    def launch(self, ctx, out, x):
        gpu.copy(out, x, LEGACY)


class Allocates(Copy):
    def launch(self, ctx, out, x):
        gpu.allocate()
        super().launch(ctx, out, x)


class AllocatesOnTheStream(Copy):
    def launch(self, ctx, out, x):
        gpu.allocate_on(ctx.stream)
        super().launch(ctx, out, x)


class Waits(Copy):
    def launch(self, ctx, out, x):
        super().launch(ctx, out, x)
        gpu.synchronize(ctx.stream)


class Reads(Copy):
    def launch(self, ctx, out, x):
        if gpu.read(x).sum() > 1e9:
            raise ValueError
        super().launch(ctx, out, x)


class ReadsThroughNumPy(Copy):
    def launch(self, ctx, out, x):
        if np.asarray(x).sum() < 1e9:
            super().launch(ctx, out, x)


class IsRefusedByCuPy(Copy):
    """CuPy asks whether the stream is captured before it copies."""

    def launch(self, ctx, out, x):
        raise RuntimeError("the current stream is capturing, so D2H transfers are disallowed.")


class Raises(Copy):
    def launch(self, ctx, out, x):
        raise ValueError("not like this")


class IgnoresErrors(Copy):
    def launch(self, ctx, out, x):
        super().launch(ctx, out, x)
        driver_call = gpu.library.cuStreamSynchronize
        driver_call(ctypes.c_void_p(ctx.stream))


@pytest.mark.parametrize(
    ("sin", "line", "remedy"),
    [
        (Elsewhere, "launches nothing on ctx.stream: nothing was recorded", "inside of `with ctx:`"),
        (OnTheDefaultStream, "launches on CUDA's default stream", "inside of `with ctx:`"),
        (Allocates, "allocates", "Let XLA have it"),
        (AllocatesOnTheStream, "allocates on its stream", "Let XLA have it"),
        (Waits, "waits for the GPU", "leave it out"),
        (Reads, "reads values on the host", "compute with them on the GPU"),
        (ReadsThroughNumPy, "reads values on the host", "compute with them on the GPU"),
        (IsRefusedByCuPy, "reads values on the host", "compute with them on the GPU"),
        (Raises, "raises while it is recorded, and not otherwise", "ValueError: not like this"),
        (IgnoresErrors, "does what may not be done while a stream is captured", "check what each call of CUDA returns"),
    ],
    ids=lambda it: it.__name__ if isinstance(it, type) else "",
)
def test_a_sin_is_named(driver, sin, line, remedy):
    detail = failed(sin(), X)
    assert detail.startswith(f"compiled, vmap: {sin.__name__} {line}")
    assert remedy in detail
    if sin not in (Elsewhere, AllocatesOnTheStream, IgnoresErrors):
        assert re.search(r"in line \d+ of (test_capture|tiny_gpu)\.py, `", detail)


def test_part_of_it_elsewhere_is_seen_in_the_replay(driver):
    detail = failed(PartlyElsewhere(), X)
    assert detail.startswith("compiled: a replay of what was recorded, against the call: 3 of 3 elements differ")
    assert "What is launched on another stream, or computed on the host, is not replayed" in detail


class WaitsInTheBackward(WithBackward):
    def launch_backward(self, ctx, grad, cotangent):
        super().launch_backward(ctx, grad, cotangent)
        gpu.synchronize(ctx.stream)


def test_a_sin_of_the_backward_kernel(driver):
    detail = failed(WaitsInTheBackward(), X)
    assert detail.startswith("gradient, vmap of the gradient: WaitsInTheBackward waits for the GPU")


class Poisons(Waits):
    on_error = "poison"


def test_an_error_that_poisons_is_seen(driver):
    """Its results cannot be poisoned either."""
    pytest.importorskip("cupy", reason="CuPy is not installed: it comes with the extras cuda12 and cuda13")
    detail = failed(Poisons(), X)
    assert detail.startswith("compiled, vmap: Poisons waits for the GPU")
    assert "cuStreamSynchronize returned 900" in detail


class FromThePool(Copy):
    def launch(self, ctx, out, x):
        import cupy

        cupy.empty(3)


def test_memory_of_the_pool_of_cupy(driver):
    """The pool would have some, and nothing would be wrong until a replay."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed: it comes with the extras cuda12 and cuda13")
    before = cupy.cuda.memory._get_thread_local_allocator()
    detail = failed(FromThePool(), X)
    assert detail.startswith("compiled, vmap: FromThePool allocates, in line ")
    assert "`cupy.empty(3)`: CuPy was asked for 24 bytes" in detail
    assert cupy.cuda.memory._get_thread_local_allocator() == before


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ("_ndarray_base.get, streamSynchronize", "reads values on the host"),
        ("asnumpy, _ndarray_base.get, streamSynchronize", "reads values on the host"),
        ("Stream.synchronize, streamSynchronize", "waits for the GPU"),
        ("memory.alloc, runtime.malloc", "allocates"),
        ("RawKernel.__call__, moduleLoadData", "compiles or loads a kernel"),
        ("function.launchKernel", "does what may not be done"),
    ],
)
def test_the_functions_of_a_library_tell_what_it_was(driver, calls, said):
    """By the names that CuPy's functions have in a traceback."""
    innermost, *outer = reversed(calls.split(", "))
    namespace: dict[str, Any] = {"__name__": "cupy.cuda"}
    code = "def function():\n    raise RuntimeError('cudaErrorStreamCaptureUnsupported')"
    exec(code, namespace)
    function = namespace["function"]
    for name in (innermost, *outer):
        function = _calling(function, name)

    class Calls(Copy):
        def launch(self, ctx, out, x):
            gpu.library.cuStreamSynchronize(ctypes.c_void_p(ctx.stream))  # the driver has refused something
            function()

    assert f".Calls {said}" in failed(Calls(), X)


def _calling(inner, name):
    namespace = {"__name__": "cupy.cuda", "inner": inner}
    exec("def outer():\n    inner()", namespace)
    outer = namespace["outer"]
    return types.FunctionType(outer.__code__.replace(co_name=name, co_qualname=name), namespace)


# What the row does not apply to.


def test_without_a_gpu():
    if xla.platform_in_use(()) != "cpu":
        pytest.skip("this machine has a GPU")
    report = check(Copy(), X, capture=True, only="types")
    assert [(entry.name, entry.result) for entry in report.rows] == [("types", "ok"), ("capture", "not applicable")]
    assert report["capture"].detail == "no GPU: nothing can be recorded"


def test_it_runs_when_it_is_asked_for():
    report = check(Copy(), X, skip=[name for name in ROWS if name not in ("types", "capture")])
    assert [entry.name for entry in report.rows] == ["types"]


def test_a_kernel_that_is_not_declared(driver):
    class Undeclared(Waits):
        command_buffer_compatible = False

    outcome = row(Undeclared(), X)
    assert (outcome.result, outcome.detail) == (
        "not applicable",
        "no kernel in Python is declared command_buffer_compatible",
    )


def test_ops_and_functions(driver):
    def body(ctx, out, x):
        Copy().kernel(ctx, out, x)

    op = eqxc.Op(
        "copy",
        kernels={"cpu": eqxc.PythonKernel(body), "cuda": eqxc.PythonKernel(body, command_buffer_compatible=True)},
        reference=lambda x: x * 1,
        vmap_method={"x": "broadcast_all"},
    )
    assert row(op, X).detail == "recorded 2 copies"

    def function(x):
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return eqxc.buffer_callback(body, like, vmap_method="broadcast_all", command_buffer_compatible=True)(x)

    assert row(function, jnp.arange(3)).detail == "recorded 2 copies"


def test_nothing_to_launch(driver):
    class OfNothing(Copy):
        def launch(self, ctx, out, x):
            if x.nbytes:
                super().launch(ctx, out, x)

    assert row(OfNothing(), jnp.zeros((0,))).result == "ok"


class InPlace(Copy):
    """Its output is not filled before the replay."""

    input_output_aliases: ClassVar = {"x": 0}

    def launch(self, ctx, out, x):
        gpu.fill(out, 0, ctx.stream)

    def kernel(self, ctx, out, x):
        if ctx.platform == "cpu":
            np.asarray(out)[...] = 0
        else:
            self.launch(ctx, out, x)

    def reference(self, x):
        return x * 0


def test_in_place(driver):
    assert row(InPlace(), X).detail == "recorded 2 fills"


# The driver.


def test_an_old_driver_says_what_it_lacks(driver, tmp_path):
    """One that launches kernels, and knows no graphs."""
    names = ["Init", "GetErrorName", "GetErrorString", "DriverGetVersion", "DeviceGetCount", "CtxGetCurrent"]
    names += ["CtxGetDevice", "CtxSetCurrent", "DevicePrimaryCtxRetain", "DevicePrimaryCtxRelease_v2"]
    names += ["ThreadExchangeStreamCaptureMode", "ModuleLoadData", "ModuleUnload", "ModuleGetFunction"]
    names += ["FuncSetAttribute", "LaunchKernel"]
    source = "".join(f'extern "C" int cu{name}() {{ return 0; }}\n' for name in names)
    library = tmp_path / "libold.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", library], input=source, text=True, check=True)
    xla.launch_with(str(library))
    assert "the CUDA driver has no cuStreamCreate; it is too old" in failed(Copy(), X)


@pytest.mark.parametrize("call", ["cuStreamCreate", "cuStreamBeginCapture", "cuGraphInstantiate", "cuGraphLaunch"])
def test_errors_of_the_driver(driver, call):
    class Fails(Copy):
        pass

    driver.fail(call, 2)
    detail = failed(Fails(), X)
    assert call in detail
    assert "out of memory (CUDA_ERROR_OUT_OF_MEMORY)" in detail


def test_a_capture_that_fails_for_another_reason(driver):
    class Unjoined(Copy):
        def launch(self, ctx, out, x):
            super().launch(ctx, out, x)
            driver.fail("cuStreamEndCapture", 904)

    detail = failed(Unjoined(), X)
    assert "leaves work on a second stream: cuStreamEndCapture failed" in detail


def test_checked_mode_rests_and_comes_back(driver):
    with debug.checked():
        assert row(Copy(), X).result == "ok"
        lazy = eqxc.buffer_callback(lambda ctx, out: None, jax.ShapeDtypeStruct((2,), jnp.float32))
        with pytest.raises(eqxc.KernelError, match="were never written"):
            lazy()
