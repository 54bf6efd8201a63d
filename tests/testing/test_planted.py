"""Layers that are wrong in one thing, and the row that says so."""

import ctypes
import gc
import itertools
import subprocess
import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback.testing import check
from eqxcallback.testing._check import ROWS

from ..layers import Scale
from .catching import caught_by, failures
from .layers import Dense, dense, normal, scale


# Types.


class ShapeLie(Scale):
    def out_type(self, x):
        return jax.ShapeDtypeStruct((*x.shape, 2), x.dtype)


class DtypeLie(Scale):
    def out_type(self, x):
        return jax.ShapeDtypeStruct(x.shape, jnp.int32)


@pytest.mark.parametrize("layer", [ShapeLie, DtypeLie])
def test_a_lie_about_types(layer):
    row = caught_by("types", *scale(layer))
    assert "expected out_type and reference to agree" in row.detail


class Raises(Scale):
    def kernel(self, ctx, out, x):
        out.write(np.float64(2) * np.asarray(x, np.float64))  # of another dtype than the output's


class RaisesQuietly(Raises):
    on_error = "poison"


@pytest.mark.parametrize("layer", [Raises, RaisesQuietly])
def test_a_kernel_that_raises(layer):
    row = caught_by("types", *scale(layer))
    assert "float64" in row.detail


# Memory.


def address(array):
    return array.ctypes.data_as(ctypes.c_void_p)


class Overwrites(Scale):
    def kernel(self, ctx, out, x):
        super().kernel(ctx, out, x)
        zeros = np.zeros(x.shape, x.dtype)
        if x.size:
            ctypes.memmove(x._address, address(zeros), x.dtype.itemsize)


class WritesBeyond(Scale):
    def kernel(self, ctx, out, x):
        super().kernel(ctx, out, x)
        if type(out.numpy()) is not np.ndarray:  # in checked mode: elsewhere it would be somebody's memory
            ctypes.memset(out._address + out.nbytes, 0x5A, 2)


class OverwritesBackward(Dense):
    def backward(self, ctx, grads, args, out, cotangents):
        super().backward(ctx, grads, args, out, cotangents)
        ctypes.memset(cotangents[0]._address, 0, min(4, cotangents[0].nbytes))


@pytest.mark.parametrize("planted", [scale(Overwrites), dense(OverwritesBackward)], ids=["forward", "backward"])
def test_an_input_is_overwritten(planted):
    row = caught_by("inputs untouched", *planted)
    assert "was changed" in row.detail
    assert "never written" not in row.detail


def test_a_write_beyond_an_output():
    row = caught_by("inputs untouched", *scale(WritesBeyond))
    assert "2 bytes after its memory were overwritten" in row.detail


BEYOND = """
import ctypes, numpy as np, jax.numpy as jnp
import eqxcallback as eqxc

def write_beyond(buffer):
    ctypes.memset(buffer._address + buffer.nbytes, 0, 16)

class Layer(eqxc.Layer):
    def kernel(self, ctx, out, x):
        np.copyto(np.asarray(out), np.asarray(x))
    def reference(self, x):
        return x

class Forward(Layer):
    def kernel(self, ctx, out, x):
        super().kernel(ctx, out, x)
        write_beyond(out)

class Backward(Layer):
    def backward(self, ctx, grads, args, out, cotangents):
        np.copyto(np.asarray(grads[1]), np.asarray(cotangents))
        write_beyond(grads[1])

class Half(Layer):
    def kernel(self, ctx, out, x):
        super().kernel(ctx, out, x)
        if out.dtype == np.float16:
            write_beyond(out)

class Blocks(Layer):
    vmap_method = "fold"
    def kernel(self, ctx, out, x):
        super().kernel(ctx, out, x)
        if out.size == 7 * 16:
            write_beyond(out)

try:
    eqxc.testing.check({layer}(), jnp.arange(16.0), only={only})
except eqxc.testing.CheckFailed as error:
    for row in error.report.rows:
        print(f"{{row.name}}: {{row.result}}, {{row.detail}}")
"""


@pytest.mark.parametrize(
    ("layer", "only", "failed", "where"),
    [
        ("Forward", tuple(ROWS), "inputs untouched", "eager"),
        ("Forward", ("outputs written",), "inputs untouched", "eager"),
        ("Backward", ("types", "grad"), "inputs untouched", "gradient"),
        ("Half", ("types", "dtypes"), "dtypes", "float16"),
        ("Blocks", ("types", "odd shapes"), "odd shapes", "7 examples, arguments mapped"),
    ],
)
def test_a_write_to_the_memory_of_others(layer, only, failed, where):
    """In a process of its own, which would die of it."""
    program = BEYOND.format(layer=layer, only=only)
    run = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    first = next(line for line in run.stdout.splitlines() if ": failed, " in line)
    assert first.startswith(f"{failed}: failed, {where}: ")
    assert "16 bytes after its memory were overwritten, the nearest at 1" in first
    others = [line for line in run.stdout.splitlines() if line.endswith("not run: a kernel writes beyond its memory")]
    not_run = [name for name in only if name != failed] if failed == "inputs untouched" else []
    assert [line.split(":")[0] for line in others] == not_run


class Unwritten(Scale):
    def kernel(self, ctx, out, x):
        y = np.asarray(x) * np.asarray(self.weight)
        np.asarray(out)[..., :-1] = y[..., :-1]


class UnwrittenBackward(Dense):
    def backward(self, ctx, grads, args, out, cotangents):
        without_bias = eqx.tree_at(lambda it: it.bias, grads[0], None)
        super().backward(ctx, (without_bias, *grads[1:]), args, out, cotangents)


class UnwrittenUnderVmap(Scale):
    def kernel(self, ctx, out, x):
        y = np.asarray(x) * np.asarray(self.weight)
        np.asarray(out).reshape(-1)[: 2 * y.shape[-1]] = y.reshape(-1)[: 2 * y.shape[-1]]


class ReadsOutput(Scale):
    """Right if the memory is all zeros, as new memory often is."""

    def kernel(self, ctx, out, x):
        garbage = np.asarray(out).view(np.uint8).reshape(*out.shape, -1).sum(-1) / 256
        np.asarray(out)[...] = np.asarray(x) * np.asarray(self.weight) * (1 + garbage).astype(out.dtype)


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        (scale(Unwritten), "1 of 3 elements were never written, the first at (2,)"),
        (dense(UnwrittenBackward), "4 of 4 elements were never written"),
        (scale(UnwrittenUnderVmap), "3 of 9 elements were never written, the first at (2, 0)"),
        (scale(ReadsOutput), "outputs that held other values before"),
    ],
    ids=["forward", "backward", "vmap", "read"],
)
def test_an_element_is_unwritten(planted, message):
    assert message in caught_by("outputs written", *planted).detail


SKIPS = """
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error Impl(int64_t missing, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y) {
  for (int64_t i = 0; i + (missing > 0) < int64_t(x.element_count()); ++i) y->typed_data()[i] = 2 * x.typed_data()[i];
  if (missing < 0 && x.element_count()) x.typed_data()[0] = 3;
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    Skips, Impl, ffi::Ffi::Bind().Attr<int64_t>("missing").Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());
"""


def test_native_kernels(tmp_path):
    library = tmp_path / "libskips.so"
    command = ["g++", "-std=c++17", "-O0", "-fPIC", "-shared", "-isystem", jax.ffi.include_dir(), "-x", "c++", "-"]
    subprocess.run([*command, "-o", str(library)], input=SKIPS, text=True, check=True)
    op = eqxc.Op(
        "skips",
        {"cpu": eqxc.NativeKernel("Skips", library)},
        reference=lambda x, *, missing: 2 * x,
        vmap_method={"x": "broadcast_all"},
    )
    rows = ("types", "inputs untouched", "outputs written", "determinism")
    for size in (3, 5000):
        assert check(op, normal(1, size), only=rows, missing=0).passed
        row = caught_by("outputs written", op, normal(1, size), missing=1)
        assert "compiled: output 0" in row.detail
        assert f"1 of {size} elements were never written, the first at ({size - 1},)" in row.detail
    row = caught_by("inputs untouched", op, normal(1, 3), missing=-1)
    assert "eager: args[0] after the call: 1 of 3 elements differ, most at (0,): got 3.0" in row.detail


class Keeps(Scale):
    def kernel(self, ctx, out, x):
        super().kernel(ctx, out, x)
        kept.append(out)


kept = []


@pytest.fixture
def few_objects():
    """Python's collector, which comes after each call that keeps a buffer, leaves alone what other tests have made."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("few_objects")
def test_a_buffer_is_kept():
    (row,) = failures(*scale(Keeps), only=list(ROWS)[:10])
    assert row.name == "buffers released"
    assert "was kept past the call" in row.detail
    kept.clear()


class KeepsUnderVmap(Unwritten):
    """Unwritten elements in other calls: what they say comes first."""

    def kernel(self, ctx, out, x):
        (Scale if np.ndim(out) > 1 else Unwritten).kernel(self, ctx, out, x)
        if np.ndim(out) > 1:
            kept.append(out)


@pytest.mark.usefixtures("few_objects")
def test_a_fault_does_not_hide_another():
    (row,) = failures(*scale(KeepsUnderVmap), only="buffers released")
    assert {line.partition(":")[0] for line in row.detail.splitlines()} == {"vmap"}
    assert "was kept past the call" in row.detail
    kept.clear()


# Values.


class Counts(Scale):
    def kernel(self, ctx, out, x):
        np.multiply(x, np.asarray(self.weight) + next(counter) * np.float32(1e-3), out=np.asarray(out))


class RemembersLast(Scale):
    """Adds the last call's arrays: the same call twice is the same."""

    def kernel(self, ctx, out, x):
        super().kernel(ctx, out, x)
        now = np.array(out)
        before = last.get(now.shape, now)
        last[now.shape] = now
        np.asarray(out)[...] += before - now


class RemembersFirst(Scale):
    """As a cache with a key that has too little."""

    def kernel(self, ctx, out, x):
        weight = last.setdefault(("weight", np.shape(self.weight)), np.array(self.weight))
        np.multiply(x, weight, out=np.asarray(out))


counter = itertools.count()
last = {}


@pytest.mark.parametrize("layer", [Counts, RemembersLast, RemembersFirst])
def test_state_is_kept(layer):
    last.clear()
    assert "stateless" in [row.name for row in failures(*scale(layer))]


def test_state_of_the_last_call_is_no_lack_of_determinism():
    last.clear()
    names = [row.name for row in failures(*scale(RemembersLast), only=("determinism", "stateless", "reference", "jit"))]
    assert names[0] == "stateless"


class Noisy(Scale):
    def kernel(self, ctx, out, x):
        super().kernel(ctx, out, x)
        np.asarray(out)[...] += np.random.default_rng().random(out.shape).astype(out.dtype) * out.dtype.type(1e-6)


def test_noise_below_the_tolerance():
    """Only bits tell."""
    names = [row.name for row in failures(*scale(Noisy), only=("determinism", "reference", "jit", "vmap"))]
    assert names == ["determinism"]


class WrongValue(Scale):
    def kernel(self, ctx, out, x):
        np.multiply(x, np.asarray(self.weight), out=np.asarray(out))
        if out.size:
            np.asarray(out)[..., 0] *= np.asarray(1.01, out.dtype)


def test_a_wrong_value():
    row = caught_by("reference", *scale(WrongValue))
    assert row.worst_error == pytest.approx(0.005, abs=0.005)
    assert "1 of 3 elements differ, most at (0,): got" in row.detail


class Unsafe(Scale):
    """Its scratch space is everybody's."""

    def kernel(self, ctx, out, x):
        scratch = last.setdefault(out.shape, np.empty(out.shape, out.dtype)).astype(out.dtype, copy=False)
        np.multiply(x, self.weight, out=scratch)
        time.sleep(1e-3)
        np.asarray(out)[...] = scratch


def test_threads_share_scratch_space():
    last.clear()
    assert "thread " in caught_by("threads", *scale(Unsafe), skip="dtypes").detail


class Single(Scale):
    """Computes in f32 what is f64."""

    def kernel(self, ctx, out, x):
        np.asarray(out)[...] = (np.asarray(x).astype(np.float32) * np.asarray(self.weight).astype(np.float32)).astype(
            out.dtype
        )


class Truncates(Scale):
    """Rounds to zero in 16 bits."""

    def kernel(self, ctx, out, x):
        super().kernel(ctx, out, x)
        if out.dtype.itemsize == 2:
            np.asarray(out).view(np.uint16)[...] &= 0xFFC0


class Refuses(Scale):
    def kernel(self, ctx, out, x):
        if out.dtype != np.float32:
            raise TypeError(f"Refuses: expected float32; got {out.dtype}.")
        super().kernel(ctx, out, x)


@pytest.mark.parametrize(("layer", "dtype"), [(Single, "float64"), (Truncates, "bfloat16")])
def test_another_dtype_is_wrong(layer, dtype):
    row = caught_by("dtypes", *scale(layer))
    assert row.detail.splitlines()[0 if dtype == "float64" else -1].startswith(dtype)


def test_another_dtype_may_be_refused():
    assert check(*scale(Refuses))["dtypes"].detail == "refused: float16, bfloat16, float64"
