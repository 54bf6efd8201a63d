"""The kernels in Python against the references: every op, dtype, way to batch and derivative."""

import functools
import importlib
import inspect
import itertools
import pickle
import pkgutil
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import ops
from eqxcallback.kernels import host

from . import cases
from .cases import normal


F32, BF16, F16, F64 = (np.dtype(dtype) for dtype in (np.float32, ml_dtypes.bfloat16, np.float16, np.float64))
TOLERANCES = {F32: 2e-6, BF16: 2.0**-7, F16: 2.0**-9, F64: 1e-12}


def labels(shape, size):
    return np.random.default_rng(4).integers(-size, size, shape).astype(np.int32)


def int8(*shape) -> Any:
    return np.random.default_rng(5).integers(-128, 128, shape).astype(np.int8)


def floats(dtype, *shapes, scale=1.0):
    return [normal(i, shape, dtype, scale) for i, shape in enumerate(shapes)]


def rotation(dtype, *shape, batch=None) -> Any:
    (angles,) = floats(F32, ((*shape[:-2], shape[-1] // 2) if batch is None else (*batch, shape[-3], shape[-1] // 2)))
    return [*floats(dtype, shape), np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)]


def attended(dtype, batch, queries, keys, heads, kv_heads, size) -> Any:
    kv = (*batch, keys, kv_heads, size)
    return floats(dtype, (*batch, queries, heads, size), kv, kv)


def pairs(*shape) -> Any:
    """A bias, slopes, segments, lengths and offsets for `(*batch, heads, queries, keys)`."""
    *batch, heads, queries, keys = shape
    rng = np.random.default_rng(6)
    segments = (rng.integers(0, 2, (*batch, size)).astype(np.int32) for size in (queries, keys))
    lengths, offset = (rng.integers(keys // 2, keys, batch).astype(np.int32) for _ in range(2))
    return [normal(7, (heads, queries, keys)), normal(8, (heads,)), *segments, lengths, offset]


def with_options(q, k, v, bias, alibi_slopes, query_ids, key_ids, lengths, offset, *, dropout=0.0, **options):
    """One key for each example."""
    key = jax.random.split(jax.random.key(3), q.shape[:-3]) if dropout else None
    return ops.attention(
        q,
        k,
        v,
        bias=bias,
        mask=bias > -1,
        alibi_slopes=alibi_slopes,
        segment_ids=(query_ids, key_ids),
        lengths=lengths,
        offset=offset,
        dropout=dropout,
        key=key,
        **options,
    )


SMOOTH: Any = {"label_smoothing": 0.1, "z_loss": 0.01, "ignore_index": -2}

# For each op: the function, and operands as a function of the dtype. No two sizes are equal.
EXAMPLES: dict[str, tuple[Any, Any]] = {
    "rms_norm": (ops.rms_norm, lambda d: floats(d, (2, 17), (17,))),
    "rms_norm plain": (ops.rms_norm, lambda d: floats(d, (1,))),
    "rms_norm of nothing": (ops.rms_norm, lambda d: floats(d, (3, 0), (0,))),
    "add_rms_norm": (ops.add_rms_norm, lambda d: floats(d, (2, 17), (2, 17), (17,))),
    "add_rms_norm plain": (ops.add_rms_norm, lambda d: floats(d, (5,), (5,))),
    "layer_norm": (ops.layer_norm, lambda d: floats(d, (2, 17), (17,), (17,))),
    "layer_norm plain": (functools.partial(ops.layer_norm, eps=0.1), lambda d: floats(d, (2, 3))),
    "group_norm": (functools.partial(ops.group_norm, groups=3), lambda d: floats(d, (2, 6, 5), (6,), (6,))),
    "group_norm plain": (functools.partial(ops.group_norm, groups=1), lambda d: floats(d, (4, 7))),
    "swiglu": (ops.swiglu, lambda d: floats(d, (2, 17), (2, 17), scale=4.0)),
    "swiglu packed": (ops.swiglu, lambda d: floats(d, (3, 10), scale=4.0)),
    "geglu": (ops.geglu, lambda d: floats(d, (2, 17), (2, 17), scale=2.0)),
    "geglu exact": (functools.partial(ops.geglu, approximate=False), lambda d: floats(d, (2, 17), (2, 17), scale=2.0)),
    "geglu packed": (ops.geglu, lambda d: floats(d, (3, 10))),
    "rotary_embedding": (ops.rotary_embedding, lambda d: rotation(d, 2, 3, 5, 6)),
    "rotary_embedding of one table": (ops.rotary_embedding, lambda d: rotation(d, 4, 2, 3, 5, 6, batch=())),
    "attention": (ops.attention, lambda d: attended(d, (2,), 3, 5, 4, 2, 6)),
    "attention causal": (
        functools.partial(ops.attention, causal=True, scale=0.4),
        lambda d: attended(d, (), 7, 5, 3, 1, 6),
    ),
    "attention of no keys": (ops.attention, lambda d: attended(d, (), 3, 0, 4, 2, 5)),
    "attention with options": (
        functools.partial(with_options, causal=True, window=3, soft_cap=2.0),
        lambda d: [*attended(d, (2,), 3, 5, 4, 2, 6), *pairs(2, 4, 3, 5)],
    ),
    "attention with options of many": (
        functools.partial(with_options, window=700, dropout=0.3),
        lambda d: [*attended(d, (), 70, 1101, 2, 1, 3), *pairs(2, 70, 1101)],
    ),
    "attention of many": (
        functools.partial(ops.attention, causal=True),
        lambda d: attended(d, (), 150, 1101, 2, 1, 3),
    ),
    "decode_attention": (
        ops.decode_attention,
        lambda d: [*attended(d, (3,), 1, 5, 4, 2, 6)[1:], np.array([-1, 3, 9], np.int32)],
    ),
    "decode_attention of many": (
        ops.decode_attention,
        lambda d: [*attended(d, (), 1, 1101, 2, 1, 3)[1:], np.int32(1001)],
    ),
    "decode_attention with options": (
        functools.partial(ops.decode_attention, window=4, soft_cap=2.0, alibi_slopes=np.ones(4, np.float32)),
        lambda d: [*attended(d, (3,), 1, 9, 4, 2, 6)[1:], np.array([-1, 3, 9], np.int32)],
    ),
    "cache_append": (
        functools.partial(ops.cache_append, batch_dims=1),
        lambda d: [*floats(d, (3, 7, 2, 5), (3, 4, 2, 5)), np.array([-3, 2, 6], np.int32)],
    ),
    "cache_append of scalars": (ops.cache_append, lambda d: [*floats(d, (7,), (3,)), np.int32(1)]),
    "softmax_cross_entropy": (ops.softmax_cross_entropy, lambda d: [*floats(d, (2, 17), scale=3.0), labels((2,), 17)]),
    "softmax_cross_entropy smooth": (
        functools.partial(ops.softmax_cross_entropy, **SMOOTH),
        lambda d: [*floats(d, (5, 3)), np.array([-2, 1, 0, 2, -2], np.int32)],
    ),
    "linear_cross_entropy": (
        ops.linear_cross_entropy,
        lambda d: [*floats(d, (2, 5), (7, 5)), labels((2,), 7)],
    ),
    "linear_cross_entropy of many": (
        functools.partial(ops.linear_cross_entropy, soft_cap=2.0, **SMOOTH),
        lambda d: [*floats(d, (3, 5), (1030, 5)), np.array([1029, -2, 300], np.int32)],
    ),
    "linear": (ops.linear, lambda d: floats(d, (2, 5), (3, 5), (3,))),
    "linear plain": (ops.linear, lambda d: floats(d, (5,), (3, 5))),
    "embedding": (ops.embedding, lambda d: [np.array([[0, -1, 9], [-7, 2, 2]], np.int32), *floats(d, (5, 3))]),
    "quantized_linear Q4_1": (
        functools.partial(ops.quantized_linear, encoding="Q4_1"),
        lambda d: [*floats(d, (2, 64)), cases.blocks(2, 1027, 64, "Q4_1")],
    ),
    "quantized_linear Q8_0": (
        functools.partial(ops.quantized_linear, encoding="Q8_0"),
        lambda d: [*floats(d, (64,)), cases.blocks(2, 17, 64, "Q8_0")],
    ),
    "int8_linear": (
        ops.int8_linear,
        lambda d: [*floats(d, (2, 5)), int8(1027, 5), *floats(d, (1027,), scale=0.1)],
    ),
    "rounded_int8_linear": (
        functools.partial(ops.int8_linear, activations="int8"),
        lambda d: [*floats(d, (2, 5)), int8(1027, 5), *floats(d, (1027,), scale=0.1)],
    ),
    "rounded_quantized_linear": (
        functools.partial(ops.quantized_linear, encoding="Q8_0", activations="int8"),
        lambda d: [*floats(d, (2, 64)), cases.blocks(2, 17, 64, "Q8_0")],
    ),
    "lstm_gates": (ops.lstm_gates, lambda d: floats(d, (2, 12), (2, 3))),
    "gru_gates": (ops.gru_gates, lambda d: floats(d, (2, 9), (2, 9), (2, 3), (3,))),
    "gru_gates plain": (ops.gru_gates, lambda d: floats(d, (9,), (9,), (3,))),
}


def example(name, dtype):
    """The function, and its operands. Of decoding, the query is made of a row of keys."""
    function, make = EXAMPLES[name]
    args = make(dtype)
    if name.startswith("decode_attention"):
        k, v, length = args
        heads = 2 * k.shape[-2]
        args = [normal(9, (*k.shape[:-3], heads, k.shape[-1]), dtype), k, v, length]
    return function, args


@functools.cache
def chosen(name, implementation):
    """One function for each: JAX compiles it once."""
    function = EXAMPLES[name][0]
    return functools.partial(function, implementation=implementation)


def close(got, want, factor=1.0):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.dtype, g.shape) == (w.dtype, w.shape)
        if g.dtype == jax.dtypes.float0:
            continue
        tolerance = factor * TOLERANCES.get(np.dtype(g.dtype), 0)
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        largest = np.max(np.abs(w), initial=1, where=np.isfinite(w))
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance * largest)


by_name = pytest.mark.parametrize("name", EXAMPLES)


def test_every_op_has_one():
    tested = {getattr(function, "func", function) for function, _ in EXAMPLES.values()} - {with_options}
    takes = {
        value
        for value in vars(ops).values()
        if inspect.isfunction(value) and "implementation" in inspect.signature(value).parameters
    }
    assert tested == takes


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
@by_name
def test_values(name, dtype, x64):
    function, args = example(name, dtype)
    if dtype == F64 and "quantized" in name:
        with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
            function(*args, implementation="python")
        return
    before = [arg.tobytes() for arg in args]
    got = chosen(name, "python")(*args)
    close(got, cases.quickly_compiled(chosen(name, "reference"))(*args))
    assert [arg.tobytes() for arg in args] == before


# Kernels see batches as an op's modes say: examples are few, so that each has several maps.


def maps(count):
    every = [axes for axes in itertools.product((0, None), repeat=count) if 0 in axes]
    return [every[i] for i in np.random.default_rng(0).permutation(len(every))[:3]]


def stacked(x):
    if x.dtype == np.uint8:  # blocks: rows in another order
        return np.stack([x, np.roll(x, 1, axis=0)])
    if x.dtype in (np.int32, np.int8):
        return np.stack([x, x - 1])
    return np.stack([x, x + normal(7, x.shape, x.dtype, 0.5)])


SMALL = [name for name in EXAMPLES if "many" not in name and "nothing" not in name and "no keys" not in name]


@pytest.mark.parametrize("name", SMALL)
def test_vmap(name):
    """One map of some operands, and two of different ones."""
    _, args = example(name, F32)
    args = [arg[:5] if arg.shape[:1] == (1027,) else arg for arg in args]
    outer, inner = maps(len(args))[0], maps(len(args))[-1]
    once = [arg if axis is None else stacked(arg) for arg, axis in zip(args, inner, strict=True)]
    twice = [arg if axis is None else stacked(arg) for arg, axis in zip(once, outer, strict=True)]

    def both(implementation):
        one = jax.vmap(chosen(name, implementation), inner)
        return cases.quickly_compiled(lambda once, twice: (one(*once), jax.vmap(one, outer)(*twice)))(once, twice)

    close(both("python"), both("reference"))


@pytest.mark.parametrize("name", ["add_rms_norm", "geglu exact", "linear_cross_entropy", "attention", "int8_linear"])
def test_gradients(name):
    _, args = example(name, F32)
    numbers = tuple(i for i, arg in enumerate(args) if arg.dtype == F32)

    def loss(f):
        return lambda *args: sum(jnp.sin(out).sum() for out in jax.tree.leaves(f(*args)))

    got, want = (
        cases.quickly_compiled(jax.grad(loss(chosen(name, each)), numbers))(*args) for each in ("python", "reference")
    )
    close(got, want, factor=10)


@pytest.mark.parametrize("name", ["add_rms_norm", "decode_attention"])
def test_check(name):
    function, args = example(name, F32)
    rows = ("inputs untouched", "outputs written", "reference", "aliasing")
    subject = functools.partial(function, implementation="python")

    def named(*args):
        return subject(*args)

    eqxc.testing.check(named, *args, reference=functools.partial(function, implementation="reference"), only=rows)


def test_sums_and_caches_are_in_place():
    """A donated residual becomes the sum, a donated cache the longer one."""
    x, residual, cache, row = (jnp.ones(shape) for shape in ((3, 5), (3, 5), (7, 2), (1, 2)))
    steps: list[Any] = [
        # JAX gives what is donated to the first result of its type.
        (lambda x, r: ops.add_rms_norm(x, r, implementation="python")[::-1], 1, (x, residual)),
        (lambda c, r: ops.cache_append(c, r, 2, implementation="python"), 0, (cache, row)),
    ]
    for step, donated, args in steps:
        pointer = args[donated].unsafe_buffer_pointer()
        out = jax.tree.leaves(jax.jit(step, donate_argnums=donated)(*args))[0]
        assert out.unsafe_buffer_pointer() == pointer


def test_what_is_ignored_or_out_of_range():
    logits = jnp.array([[1e4, -np.inf, -1e4], [np.inf, np.nan, 0], [0, 0, 0]])
    for label, ignore in (([1, 5, 3], 5), ([0, -7, -4], -7)):
        got, want = (
            ops.softmax_cross_entropy(logits, np.array(label, np.int32), ignore_index=ignore, implementation=each)
            for each in ("python", "reference")
        )
        np.testing.assert_array_equal(got, want)
        assert (float(got[1]), bool(np.isnan(got[2]))) == (0, True)


@pytest.mark.parametrize("name", sorted(name for name in vars(host) if name.isupper()))
def test_another_process_finds_it_by_name(name):
    """As exported programs do."""
    kernel = getattr(host, name).body
    assert pickle.loads(pickle.dumps(kernel)) is kernel


# On a GPU the bodies run with CuPy: here it is only known which of its functions they call.


def test_bodies_use_what_cupy_has():
    cupy = pytest.importorskip("cupy")
    called = set()
    for module in pkgutil.iter_modules(host.__path__):
        called |= set(
            re.findall(r"xp\.(\w+)\(", inspect.getsource(importlib.import_module(f"{host.__name__}.{module.name}")))
        )
    assert {"where", "exp"} <= called
    assert [name for name in called if not hasattr(cupy, name)] == []
