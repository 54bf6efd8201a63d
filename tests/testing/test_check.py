"""Right layers, ops in both lanes, Modules and functions pass whole."""

import functools
import math
import os
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import ops
from eqxcallback.ops.attention._attention import _attention
from eqxcallback.ops.cache._cache import _cache_append
from eqxcallback.ops.norm import _reference as reference
from eqxcallback.ops.norm._norm import _rms_norm
from eqxcallback.ops.rotary._rotary import _rotary_embedding
from eqxcallback.testing import _rows_memory, check

from ..layers import Scale
from .catching import failures
from .layers import Accumulate, Dense, NoReference, dense, normal, scale


NOTHING_TO_SAY = {"export"}  # of a layer of a test, whose module may not be importable


def not_applicable(report):
    return {row.name: row.detail for row in report.rows if row.result == "not applicable"}


@pytest.mark.parametrize("planted", [scale(), dense()], ids=["reference alone", "backward"])
def test_a_layer_passes(planted):
    report = check(*planted)
    assert report.passed
    assert not_applicable(report).keys() - NOTHING_TO_SAY == {"aliasing", "late reads", "attributes"}


def test_no_kernel_runs_nothing_in_checked_mode(monkeypatch):
    """A program without kernels cannot write beyond its memory, and one whose result nobody uses still can."""
    runs = []
    original = _rows_memory._checked
    monkeypatch.setattr(_rows_memory, "_checked", lambda *args: runs.append(args) or original(*args))

    def unused(x):
        ops.rms_norm(x)
        return 2 * x

    function = functools.partial(ops.rms_norm, implementation="reference")
    assert check(function, normal(1, 3), only="types").passed
    assert not runs
    assert check(unused, normal(1, 3), only="types").passed
    assert runs


def test_a_layer_in_16_bits():
    layer, x = scale()
    report = check(Scale(layer.weight.astype(jnp.bfloat16)), x.astype(jnp.bfloat16))
    assert report["finite differences"].detail == "of the reference in float32"


def test_a_layer_in_64_bits(x64):
    report = check(
        Dense(normal(1, 4, 3, dtype=np.float64), normal(2, 4, dtype=np.float64)), normal(3, 3, dtype=np.float64)
    )
    assert report["finite differences"].worst_error == pytest.approx(0, abs=1e-6)
    assert report["vmap"].worst_error == pytest.approx(0, abs=1e-13)


def test_a_layer_of_complex_numbers():
    weight, x = (normal(i, 3, dtype=np.complex64) * np.complex64(1 + 0.5j) for i in range(2))
    check(Scale(weight), x)


def test_a_layer_that_overwrites_an_argument():
    assert check(Accumulate(), normal(1, 3), normal(2, 3))["aliasing"].result == "ok"


def test_a_layer_without_reference():
    report = check(NoReference(normal(1, 3)), normal(2, 3))
    reasons = not_applicable(report)
    assert reasons["reference"] == "no reference"
    assert reasons["jvp"] == "no forward mode: there is neither a reference nor a jvp"
    assert report["finite differences"].result == "ok"


class NoDerivative(eqxc.Layer):
    vmap_method = "fold"

    def kernel(self, ctx, out, x):
        np.asarray(out)[...] = np.floor(np.asarray(x))

    def out_type(self, x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)


class WithTangent(NoDerivative):
    """Forward and reverse mode from a rule; no reference."""

    def kernel(self, ctx, out, x):
        np.sin(x, out=np.asarray(out))

    def jvp(self, args, tangents):
        return jnp.cos(args[0]) * tangents[0]


class Integers(eqxc.Layer):
    """A tree in, a tree out, a static argument, and no floats."""

    table: jax.Array
    vmap_method = "fold"

    def kernel(self, ctx, out, x, offset, *, times=1):
        np.asarray(out["sum"])[...] = (np.asarray(x["a"]) + np.asarray(x["b"]) + offset) * times
        np.asarray(out["table"])[...] = np.asarray(self.table) * 2

    def reference(self, x, offset, *, times=1):
        return {"sum": (x["a"] + x["b"] + offset) * times, "table": self.table * 2}


class Keys(eqxc.Layer):
    vmap_method = "fold"

    def kernel(self, ctx, out, key, x):
        np.asarray(out)[...] = np.asarray(x) * (np.asarray(key)[..., :1] % 7).astype(np.float32)

    def reference(self, key, x):
        return x * (jax.random.key_data(key)[:1] % 7).astype(x.dtype)


def test_infinities():
    """They meet in sums over a batch, of which NumPy would warn: warnings are errors here."""
    assert check(Scale(normal(1, 3)), jnp.array([jnp.nan, jnp.inf, 1.0]), only="odd shapes").passed


def test_no_derivative():
    reasons = not_applicable(check(NoDerivative(), normal(1, 3)))
    assert reasons["grad"].startswith("no derivative")
    assert reasons["hessian"].startswith("no derivative")


def test_a_tangent_without_reference():
    report = check(WithTangent(), normal(1, 3))
    assert {report[name].result for name in ("finite differences", "jvp", "hessian", "scan")} == {"ok"}


def test_integers():
    tree = {"a": jnp.arange(6).reshape(2, 3), "b": jnp.ones((2, 3), jnp.int32)}
    reasons = not_applicable(check(Integers(jnp.arange(4)), tree, 3, times=2))
    assert reasons["grad"] == "integers only"
    assert reasons["dtypes"] == "no arrays of f16, bf16, f32 or f64"


def test_keys():
    check(Keys(), jax.random.key(5), normal(1, 3))


def test_no_arrays():
    class Three(eqxc.Layer):
        vmap_method = "fold"

        def kernel(self, ctx, out):
            np.asarray(out)[...] = 3

        def reference(self):
            return jnp.full((2,), 3.0)

    assert not_applicable(check(Three()))["vmap"] == "no arrays to map"


@pytest.mark.parametrize("method", ["sequential", "sequential_unrolled", "expand_dims", "broadcast_all"])
def test_every_method_of_vmap(method):
    class Scaled(Scale):
        vmap_method = method

        def kernel(self, ctx, out, x):
            x, weight = np.asarray(x), np.asarray(self.weight)
            np.multiply(x, weight, out=np.asarray(out))

    check(*scale(Scaled))


class Relu(eqxc.Layer):
    vmap_method = "fold"

    def kernel(self, ctx, out, x):
        np.maximum(np.asarray(x), 0, out=np.asarray(out))

    def reference(self, x):
        return jnp.maximum(x, 0)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_an_example_without_elements(shape):
    assert check(Relu(), jnp.zeros(shape))["nested vmap"].result == "ok"


# Ops.


def saxpy(ctx, out, x, y, *, a):
    np.asarray(out)[...] = np.asarray(x) * np.asarray(a, out.dtype) + np.asarray(y)


def test_an_op_in_python():
    op = eqxc.Op(
        "saxpy",
        kernels={"cpu": eqxc.PythonKernel(saxpy)},
        reference=lambda x, y, *, a: a * x + y,
        vmap_method={"x": "broadcast_all", "y": "broadcast_all"},
    )
    check(op, normal(1, 3), normal(2, 3), a=2.0)


def table(rows, size):
    return ops.rotary_table(jnp.arange(rows), size)


OPS = {
    "rms_norm": lambda: (_rms_norm, (normal(1, 2, 17), normal(2, 17)), {"eps": 1e-5, "center": False}),
    "rotary_embedding": lambda: (_rotary_embedding, (normal(1, 3, 2, 6), table(3, 6)), {}),
    "attention": lambda: (
        _attention,
        (normal(1, 3, 4, 6), (normal(2, 5, 2, 6), normal(3, 5, 2, 6))),
        {"causal": True, "scale": 1 / math.sqrt(6), "window": 0, "soft_cap": 0.0, "dropout": 0.0},
    ),
    "cache_append": lambda: (_cache_append, (normal(1, 5, 2), normal(2, 3, 2), jnp.int32(1)), {"row_rank": 1}),
}


@pytest.mark.parametrize("name", OPS)
def test_an_op_in_the_native_lane(name):
    op, args, options = OPS[name]()
    # The kernels for GPUs of the others are tried in tests/gpu_launch and tests/triton.
    report = check(op, *args, emulate="auto" if name == "rms_norm" else "never", **options)
    assert report["reference"].result == "ok"


# Other Modules, and functions.

SLOW = ("hessian", "dtypes", "scan", "vmap of grad", "grad of vmap", "odd shapes")


def test_a_module():
    report = check(eqx.nn.LayerNorm(4), normal(1, 4), skip=SLOW)
    assert not_applicable(report)["aliasing"] == "a function does not say what it overwrites"


def test_a_function_with_a_reference():
    report = check(ops.rms_norm, normal(1, 2, 17), normal(2, 17), reference=reference.rms_norm, eps=1e-3, skip=SLOW)
    assert report["grad"].result == "ok"


# Devices.


PROGRAM = """
import jax, numpy as np, jax.numpy as jnp
import eqxcallback as eqxc

class Scale(eqxc.Layer):
    weight: jax.Array
    def kernel(self, ctx, out, x):
        np.multiply(x, self.weight, out=np.asarray(out))
    def reference(self, x):
        return x * self.weight

report = eqxc.testing.check(Scale(jnp.ones(3)), jnp.arange(3.0), only=("sharded jit", "shard_map", "export"))
print(*(f"{row.name}: {row.result} {row.detail};" for row in report.rows))
"""


@pytest.mark.parametrize("count", [1, 8])
def test_devices(count):
    environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"}
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    run = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    result = "ok" if count > 1 else "not applicable one device"
    assert f"sharded jit: {result}" in run.stdout
    assert f"shard_map: {result}" in run.stdout
    assert "export: not applicable" in run.stdout


CUMULATE = """
void cumulate(long n, const float* x, float* out) {
  float sum = 0;
  for (long i = 0; i < n; ++i) out[i] = sum += x[i];
}
"""


@pytest.mark.parametrize(("sharding", "passes"), [(None, True), ("_ -> _", True), ("i -> i", False)])
def test_a_rule_of_sharding_that_is_wrong(sharding, passes):
    """Each device would begin again."""
    op = eqxc.Op(
        "cumulate",
        kernels={"cpu": eqxc.CKernel("cumulate", source=CUMULATE, parameters=("x.size", "x", "out"))},
        reference=lambda x: jnp.cumsum(x),
        vmap_method="threads",
        sharding=sharding,
    )
    x = jnp.arange(1.0, 1 + 2 * jax.device_count())
    if passes:
        assert eqxc.testing.check(op, x, only="sharded jit").passed
    else:
        assert "args[0] split along axis 0, against" in failures(op, x, only="sharded jit")[0].detail
