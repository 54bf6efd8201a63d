"""Attention by cuDNN: which calls it takes, what it is called with, and how its results become those of the op."""

import dataclasses
import importlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import ops
from eqxcallback.ops.attention import _cudnn, _triton
from eqxcallback.ops.attention._operands import OPTIONAL
from eqxcallback.transform import named_types

from ..table import normal
from . import by_cudnn, options


pytestmark = pytest.mark.any_jax_version

# `eqxcallback.ops.attention` is the function as well, which hides the module.
MODULE = importlib.import_module("eqxcallback.ops.attention._attention")

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
FORWARD, BACKWARD, OURS = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward", "eqxcallback_launch_captured"
PLAIN: dict[str, Any] = {"causal": True, "scale": 0.1, "window": 0, "soft_cap": 0.0, "dropout": 0.0}


def struct(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def operands(queries=64, keys=64, heads=4, kv_heads=2, size=64, dtype=BF16, batch=(2,), kv_batch=None):
    kv_batch = batch if kv_batch is None else kv_batch
    kv = struct(*kv_batch, keys, kv_heads, size, dtype=dtype)
    return struct(*batch, queries, heads, size, dtype=dtype), kv, kv


def supports(shapes: Any, optional: Any, chosen: Any) -> bool | str:
    q, k, v = operands(**shapes) if isinstance(shapes, dict) else shapes
    types = named_types(("q", "kv", *OPTIONAL), (q, (k, v), *(optional.get(name) for name in OPTIONAL)))
    return _cudnn.ATTENTION.supports(types, **PLAIN | chosen)


@pytest.mark.parametrize(
    ("shapes", "chosen"),
    [
        ({}, {}),
        ({"dtype": F16}, {}),
        ({"size": 128}, {"window": 9}),
        ({"size": 8, "heads": 2}, {"causal": False}),
        ({"queries": 33, "keys": 1}, {"causal": False}),
        ({"queries": 40, "keys": 500}, {"causal": False}),
        ({"batch": ()}, {}),
        ({"batch": (3, 2), "kv_batch": (2,)}, {}),
    ],
    ids=str,
)
def test_supported(shapes, chosen):
    with by_cudnn.usable():
        assert supports(shapes, {}, chosen) is True
    with by_cudnn.usable("it is not here"):
        assert supports(shapes, {}, chosen) == "cuDNN: it is not here"


Q, KV = struct(64, 4, 64), struct(64, 2, 64)


@pytest.mark.parametrize(
    ("shapes", "optional", "chosen", "reason"),
    [
        ({"dtype": F32}, {}, {}, "have to be bfloat16 or float16, all the same; they are float32, float32 and float32"),
        ((Q, KV, struct(64, 2, 64, dtype=F16)), {}, {}, "they are bfloat16, bfloat16 and float16"),
        ((Q, *[struct(64, 2, 64, dtype=F16)] * 2), {}, {}, "they are bfloat16, float16 and float16"),
        ({"size": 60}, {}, {}, "heads have to be a multiple of 8 and no longer than 128; they are 60"),
        ({"size": 136}, {}, {}, "no longer than 128; they are 136"),
        ({"queries": 32, "keys": 32}, {}, {}, "there have to be 33 queries or more; there are 32"),
        ({"keys": 65}, {}, {}, "there are 64 queries, and 65 keys"),
        ({"keys": 63}, {}, {}, "there are 64 queries, and 63 keys"),
        ({}, {}, {"causal": False, "window": 3}, "a window has to be causal"),
        ({}, {}, {"soft_cap": 1.0}, "it has no soft_cap"),
        ({}, {}, {"dropout": 0.1}, "it has no dropout"),
        ({}, {}, {"scale": 0.0}, "scale has to be positive; it is 0.0"),
        ({}, {}, {"scale": -1.0}, "scale has to be positive; it is -1.0"),
        ({"keys": 0}, {}, {"causal": False}, "no array may be empty"),
        ({"batch": (0,)}, {}, {}, "no array may be empty"),
        ({"size": 0}, {}, {}, "no array may be empty"),
        ({"keys": 200, "batch": (3,), "kv_batch": ()}, {}, {"causal": False}, "would be copied for each"),
        *(({}, {name: struct(2, 4, 64, 64)}, {}, f"it has no {name}") for name in OPTIONAL),
    ],
    ids=str,
)
def test_not_supported(shapes, optional, chosen, reason):
    with by_cudnn.usable():
        answer = supports(shapes, optional, chosen)
    assert isinstance(answer, str)
    assert answer.startswith("cuDNN: ")
    assert reason in answer


@pytest.mark.parametrize(
    ("shapes", "chosen", "operations"),
    [
        (operands(batch=(4,), queries=4096, keys=4096, heads=16, size=128), {}, 275e9),
        (operands(batch=(4,), queries=4096, keys=4096, heads=16, size=128), {"causal": False}, 550e9),
        (operands(batch=(4,), queries=4096, keys=4096, heads=16, size=128), {"window": 1024}, 137e9),
        (operands(batch=(4,), queries=4096, keys=4096, heads=16, size=128), {"window": 200}, 26.8e9),
        (operands(batch=(4,), queries=4096, keys=4096, heads=16, size=128), {"window": 4000}, 275e9),
        (operands(batch=(8,), queries=1024, keys=1024, heads=32), {}, 34.4e9),
        (operands(batch=(16,), queries=512, keys=512, heads=16, size=128), {}, 17.2e9),
        (operands(batch=(16,), queries=512, keys=512, heads=16, size=128), {"causal": False}, 34.4e9),
        (operands(batch=(3, 16), kv_batch=(16,), queries=512, keys=512, heads=16, size=128), {}, 51.5e9),
        (operands(batch=(), queries=1024, keys=1024, heads=16, size=128), {}, 4.29e9),
    ],
)
def test_few_operations_are_for_triton(shapes, chosen, operations):
    with by_cudnn.usable(least=_cudnn.LEAST_OPERATIONS):
        answer = supports(shapes, {}, chosen)
    few = f"cuDNN: it is the faster one from 3e+10 operations on; there are {operations:.3g}"
    assert answer == (True if operations > 30e9 else few)
    for least, is_supported in ((0.99 * operations, True), (1.01 * operations, False)):
        with by_cudnn.usable(least=least):
            assert (supports(shapes, {}, chosen) is True) == is_supported


def test_gradients_of_few_operations():
    pytest.importorskip("triton", reason="Triton is not installed")
    few, many = (operands(batch=(8,), queries=n, keys=n, heads=32) for n in (512, 1024))
    for args, names in ((few, [OURS, OURS]), (many, [FORWARD, BACKWARD])):
        with by_cudnn.usable(least=_cudnn.LEAST_OPERATIONS):
            assert targets(gradients(attend(causal=True, deterministic=False)), *args) == names


def test_fewer_queries_are_those_whose_keys_are_divided():
    assert _triton.FEW_QUERIES == 32
    assert _triton._parts(struct(32, 4, 64), (struct(4096, 2, 64),) * 2) > 0
    assert _triton._parts(struct(33, 4, 64), (struct(4096, 2, 64),) * 2) == 0


def text_of(function, *args):
    traced = jax.jit(lambda *args: function(*args)).trace(*args)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def targets(function, *args):
    """The external calls in a program for a GPU."""
    return targets_in(text_of(function, *args))


def targets_in(text):
    return re.findall(r"stablehlo.custom_call @([\w$]+)", text)


def attend(op=ops.attention, **chosen):
    return lambda q, k, v: op(q, k, v, **chosen)


def gradients(function):
    def loss(*args):
        return sum(jnp.sum(jnp.sin(leaf.astype(F32))) for leaf in jax.tree.leaves(function(*args)))

    return jax.grad(loss, (0, 1, 2))


def shared(function):
    """Mapped over the queries alone."""
    return jax.vmap(function, (0, None, None))


CALLS: dict[str, Any] = {
    "plain": (attend, {}, operands()),
    "causal": (attend, {"causal": True}, operands()),
    "window": (attend, {"causal": True, "window": 9}, operands()),
    "grouped heads": (attend, {"causal": True}, operands(heads=8, kv_heads=2, dtype=F16)),
    "no batch": (attend, {}, operands(batch=())),
    "two axes": (attend, {}, operands(batch=(2, 3))),
    "mapped": (lambda **chosen: jax.vmap(attend(**chosen)), {"causal": True}, operands(batch=(3, 2))),
    "shared keys": (lambda **chosen: shared(attend(**chosen)), {}, operands(batch=(3,), kv_batch=())),
    "shared by some": (
        lambda **chosen: jax.vmap(shared(attend(**chosen))),
        {"causal": True},
        operands(batch=(2, 3), kv_batch=(2,)),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_programs(name):
    pytest.importorskip("triton", reason="Triton is not installed")
    make, chosen, args = CALLS[name]
    with by_cudnn.usable():
        assert targets(make(**chosen), *args) == [FORWARD]
        assert targets(gradients(make(**chosen)), *args) == [FORWARD, OURS]
        assert targets(gradients(make(**chosen, deterministic=False)), *args) == [FORWARD, BACKWARD]
        assert targets(gradients(make(**chosen, op=ops.attention_with_lse, deterministic=False)), *args) == [
            FORWARD,
            OURS,
        ]
        of_triton = {**chosen, "implementation": "triton"}
        assert targets(make(**of_triton), *args) == [OURS]
        assert targets(gradients(make(**of_triton, deterministic=False)), *args) == [OURS, OURS]
        assert targets(make(**chosen, implementation="jax"), *args) == [FORWARD]
    with by_cudnn.usable("it is not here"):
        assert targets(make(**chosen), *args) == [OURS]
        one, any_order = (text_of(gradients(make(**chosen, deterministic=x)), *args) for x in (True, False))
        assert targets_in(any_order) == [OURS, OURS]
        assert any_order == one
        assert targets(make(**chosen, implementation="jax"), *args) == []


def test_other_platforms_have_one_order():
    programs = [
        jax.jit(gradients(attend(deterministic=x))).trace(*operands()).lower(lowering_platforms=("cpu",)).as_text()
        for x in (True, False)
    ]
    assert programs[0] == programs[1]


def test_forward_mode():
    """The value is cuDNN's, and JAX computes the tangents from products, as ever."""
    args = operands()
    with by_cudnn.usable():
        tangents = lambda *args: jax.jvp(attend(causal=True), args, args)[1]
        assert targets(tangents, *args) == [FORWARD]
        assert "stablehlo.dot_general" in text_of(tangents, *args)


@pytest.mark.parametrize(("window", "length"), [(1, 1), (9, 9), (63, 63), (64, 0), (None, 0), (1000, 0)])
def test_windows(window, length):
    """cuDNN's, too, is the number of keys up to the query's own."""
    with by_cudnn.usable():
        text = text_of(attend(causal=True, window=window), *operands())
    assert rf"\22sliding_window_length\22: {length}," in text
    assert r"\22mask_type\22: \22CAUSAL\22" in text


def test_other_sizes_of_values_are_padded():
    q, k, _ = operands(size=64)
    with by_cudnn.usable():
        assert targets(attend(), q, k, struct(2, 64, 2, 128)) == [FORWARD]
        assert targets(attend(), q, k, struct(2, 64, 2, 100)) == [OURS]


def test_a_report_says_why_not():
    with by_cudnn.usable("it is not here"):
        (call,) = eqxc.inspect(attend(), *operands(), platform="cuda").calls
        assert call.lane == "native"
        assert call.passed_over == (("jax kernel attention_by_cudnn", "cuDNN: it is not here"),)
    with by_cudnn.usable():
        (call,) = eqxc.inspect(attend(), *operands(), platform="cuda").calls
        assert (call.lane, call.passed_over) == ("jax", ())


def test_exported_programs():
    function = attend(causal=True, deterministic=False)
    with by_cudnn.usable():
        program = eqxc.export(gradients(function), platforms=("cuda",))(*operands())
    assert re.findall(r"custom_call @(__cudnn[\w$]+)", program.mlir_module()) == [FORWARD, BACKWARD]


def test_a_program_of_several_devices(mesh):
    """Each has its part; the call itself has no say in how it is split."""
    sharding = jax.NamedSharding(mesh, jax.P("d"))
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in operands(batch=(8,))]

    def split(*args):
        return jax.shard_map(attend(causal=True), mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))(*args)

    with by_cudnn.usable():
        text = text_of(split, *args)
    assert re.findall(r"custom_call @__cudnn\S+\(.*: \((tensor<\S+>),", text) == ["tensor<2x64x4x64xbf16>"]


@pytest.fixture
def on_cpu(monkeypatch):
    """The ops have these kernels alone, which call JAX's own formulas."""
    monkeypatch.setattr(_cudnn, "cudnn_attention", by_cudnn.forward)
    monkeypatch.setattr(_cudnn, "cudnn_attention_backward", by_cudnn.backward)
    op = dataclasses.replace(
        MODULE._attention, kernels={"cpu": _cudnn.ATTENTION}, backward={"cpu": _cudnn.VALUE_BACKWARD}
    )
    for name in ("_attention", "_attention_in_any_order"):
        monkeypatch.setattr(MODULE, name, op)
    with by_cudnn.usable(), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients(name):
    make, chosen, shapes = CALLS[name]
    args = [normal(i, x.shape, np.dtype(x.dtype)) for i, x in enumerate(shapes)]
    wide = [x.astype(np.float32) for x in args]
    (call,) = eqxc.inspect(make(**chosen), *args).calls
    assert (call.lane, call.fallback) == ("jax", "")
    got = jax.jit(make(op=ops.attention_with_lse, **chosen))(*args)
    want = jax.jit(make(op=ops.attention_with_lse, **chosen, implementation="reference"))(*wide)
    assert got[1].dtype == F32
    np.testing.assert_allclose(np.asarray(got[0], np.float32), want[0], rtol=2**-7, atol=2**-8)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-5)
    got = jax.jit(gradients(make(**chosen)))(*args)
    want = jax.jit(gradients(make(**chosen, implementation="reference")))(*wide)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(g, np.float32), w, rtol=2**-6, atol=2**-6 * np.abs(w).max())


@pytest.mark.usefixtures("on_cpu")
def test_second_derivatives():
    """In these, too, the log-sum-exp has no cotangent, which cuDNN would not take."""
    args = [normal(i, x.shape, np.dtype(x.dtype)) for i, x in enumerate(operands(40, 40, size=16, batch=()))]
    wide = [x.astype(np.float32) for x in args]
    for twice in (lambda f: gradients(gradients(f)), lambda f: lambda *args: jax.jvp(gradients(f), args, args)[1]):
        got = jax.jit(twice(attend(causal=True, deterministic=False)))(*args)
        want = jax.jit(twice(attend(causal=True, implementation="reference")))(*wide)
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(np.asarray(g, np.float32), w, rtol=2**-5, atol=2**-5 * np.abs(w).max())


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("window", [1, 2, 30, 63, 64, 65])
def test_values_of_windows(window):
    args = options.inputs(64, 64, 4, 2, 16, BF16)
    out, lse = ops.attention_with_lse(*args, causal=True, window=window)
    want, want_lse = options.exact_with_lse(*args, causal=True, window=window)
    np.testing.assert_allclose(np.asarray(out, np.float32), want, rtol=2**-7, atol=2**-8)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)
