"""Ops of batches that lie on several devices, without `vmap`: each device has its own examples, and nothing is gathered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from eqxcallback import ops

from .layers import assert_close, mesh_of, normal, put, run, spec_of


EXAMPLES = 8
LABELS = np.arange(EXAMPLES, dtype=np.int32)
LENGTHS = 1 + LABELS
QUEUES = normal(EXAMPLES, 12, 4, 16)  # as queries, keys and values
FEW, ONE = QUEUES[:, :, :2], QUEUES[:, :, :1]  # keys for two queries each, and for all
SEGMENTS = np.repeat(LABELS[:, None] % 3 + [[0, 1]], 6, axis=1).astype(np.int32)
BLOCKS = np.random.default_rng(0).integers(0, 60, (64, 2 * 34), np.uint8)
EIGHT, QUEUES8 = normal(EXAMPLES, 12, 8, 16), QUEUES.astype(np.int8)
INT8 = normal(EXAMPLES, 12, 2, 16).astype(np.int8)
TABLE = ops.rotary_table(jnp.arange(12), 16)


def attention(q, k, v, **options):
    return ops.attention(q, k, v, **options)


# A function of arrays that are split along their first axis, these, and how many more are whole.
CASES = {
    "softmax": (ops.softmax, (normal(EXAMPLES, 3, 6),), ()),
    "softmax, mask of each": (lambda x: ops.softmax(x, x > 0), (normal(EXAMPLES, 6),), ()),
    "softmax, one mask": (lambda x, m: ops.softmax(x, m > 0), (normal(EXAMPLES, 6),), (normal(6),)),
    "layer_norm": (ops.layer_norm, (normal(EXAMPLES, 6),), (normal(6), normal(6))),
    "rms_norm": (ops.rms_norm, (normal(EXAMPLES, 3, 6),), (normal(6),)),
    "add_rms_norm": (ops.add_rms_norm, (normal(EXAMPLES, 6), normal(EXAMPLES, 6)), (normal(6),)),
    "group_norm": (functools.partial(ops.group_norm, groups=2), (normal(EXAMPLES, 4, 6),), (normal(4), normal(4))),
    "gelu": (ops.gelu, (normal(EXAMPLES, 6),), ()),
    "swiglu": (ops.swiglu, (normal(EXAMPLES, 6), normal(EXAMPLES, 6) + 1), ()),
    "geglu of halves": (ops.geglu, (normal(EXAMPLES, 6),), ()),
    "softmax_cross_entropy": (lambda x: ops.softmax_cross_entropy(x, LABELS), (normal(EXAMPLES, 9),), ()),
    "softmax_cross_entropy of targets": (
        lambda x, t: ops.softmax_cross_entropy(x, jax.nn.softmax(t)),
        (normal(EXAMPLES, 9), normal(EXAMPLES, 9) + 1),
        (),
    ),
    "linear_cross_entropy": (
        lambda x, w: ops.linear_cross_entropy(x, w, LABELS),
        (normal(EXAMPLES, 6),),
        (normal(9, 6),),
    ),
    "linear": (ops.linear, (normal(EXAMPLES, 128),), (normal(192, 128), normal(192))),
    "int8_linear": (
        lambda x: ops.int8_linear(x, BLOCKS.astype(np.int8), np.ones(64, np.float32)),
        (normal(EXAMPLES, 68),),
        (),
    ),
    "quantized_linear": (
        lambda x: ops.quantized_linear(x, BLOCKS, encoding="Q8_0"),
        (normal(EXAMPLES, 64),),
        (),
    ),
    "attention": (functools.partial(attention, causal=True), (QUEUES, FEW, FEW + 1), ()),
    "attention, lengths and bias": (
        lambda q, k, v, b: attention(q, k, v, lengths=LENGTHS, bias=b),
        (QUEUES, QUEUES, QUEUES),
        (normal(4, 12, 12),),
    ),
    "attention, bias of each": (
        lambda q, k, v, b: attention(q, k, v, bias=b),
        (QUEUES, FEW, FEW, normal(EXAMPLES, 1, 12, 12)),
        (),
    ),
    "attention, documents": (
        lambda q, k, v: attention(q, k, v, segment_ids=SEGMENTS, alibi_slopes=np.ones(4, np.float32), causal=True),
        (QUEUES, ONE, ONE + 1),
        (),
    ),
    "attention, dropout": (
        lambda q, k, v: attention(q, k, v, dropout=0.3, key=jax.random.split(jax.random.key(0), EXAMPLES)),
        (QUEUES, FEW, FEW),
        (),
    ),
    "decode_attention": (
        lambda q, k, v: ops.decode_attention(q, k, v, LENGTHS),
        (QUEUES[:, 0], FEW, FEW + 1),
        (),
    ),
    "decode_attention, int8": (
        lambda q, s: ops.decode_attention(q, INT8, INT8, LENGTHS, k_scale=s, v_scale=s),
        (QUEUES[:, 0], np.abs(normal(EXAMPLES, 12, 2))),
        (),
    ),
    "rotary_embedding": (ops.rotary_embedding, (QUEUES,), TABLE),
    "rotary_embedding, a table of each": (
        ops.rotary_embedding,
        (QUEUES, normal(EXAMPLES, 12, 8), normal(EXAMPLES, 12, 8) + 1),
        (),
    ),
    "rotary_append": (
        lambda qkv, k, v, at, cos, sin: ops.rotary_append(qkv, cos[:1], sin[:1], k, v, at.astype(jnp.int32)),
        (QUEUES[:, :1], ONE, ONE + 1, LENGTHS.astype(np.float32)),
        TABLE,
    ),
    "cache_append": (
        lambda cache, rows: ops.cache_append(cache, rows, 3, batch_dims=1),
        (QUEUES, QUEUES[:, :2] + 1),
        (),
    ),
    "lstm_gates": (ops.lstm_gates, (normal(EXAMPLES, 24), normal(EXAMPLES, 6)), ()),
    "gru_gates": (ops.gru_gates, (normal(EXAMPLES, 18), normal(EXAMPLES, 18), normal(EXAMPLES, 6)), (normal(6),)),
}


def total(function):
    return lambda *args: sum(jnp.sum(jnp.square(out)) for out in jax.tree.leaves(function(*args)))


def derivative(kind, function, count):
    """A function of the same arguments."""
    every = tuple(range(count))
    return {
        "value": function,
        "grad": jax.grad(total(function), every),
        "jvp": lambda *args: jax.jvp(function, args, args)[1],
        "vmap": lambda *args: jax.vmap(function, (0, *[None] * (count - 1)))(
            jnp.stack([args[0], 2 * args[0]]), *args[1:]
        ),
    }[kind]


def check(function, kind, count, split, whole, *, specs):
    """The numbers of one device, and no more communication than the gradients of what is whole."""
    wanted = derivative(kind, function, count)
    ran = run(wanted, *split, *whole)
    assert_close(ran.values, jax.jit(wanted)(*map(np.asarray, (*split, *whole))), rtol=1e-4, atol=1e-4)
    assert ran.gathers == 0
    if kind == "grad":
        assert ran.sums == 0 or whole
        # Where nobody uses a value, its gradient is zeros everywhere.
        assert {spec_of(value) for value in ran.values[: len(split)] if np.any(value)} == {specs}
    else:
        assert ran.sums == 0
    return ran


@pytest.mark.parametrize("kind", ["value", "grad", "jvp", "vmap"])
@pytest.mark.parametrize("name", CASES)
def test_batches(name, kind):
    function, split, whole = CASES[name]
    mesh = mesh_of(4)
    split, whole = [put(x, mesh, "a") for x in split], [put(x, mesh) for x in whole]
    check(function, kind, len(split) + len(whole), split, whole, specs=jax.P("a"))


@pytest.mark.parametrize("kind", ["value", "grad"])
@pytest.mark.parametrize("name", CASES)
def test_types_on_explicit_meshes(name, kind):
    function, split, whole = CASES[name]
    mesh = mesh_of(4, kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        args = [*(put(x, mesh, "a") for x in split), *(put(x, mesh) for x in whole)]
        ran = run(derivative(kind, function, len(args)), *args)
        # With references, as without them, XLA gathers what it adds up for the gradient of a bias.
        assert ran.gathers == 0 or kind == "grad"
        if kind == "grad":
            assert [jax.typeof(x) for x in ran.values] == [jax.typeof(x) for x in args]
        else:
            assert {jax.typeof(x).sharding.spec[0] for x in jax.tree.leaves(ran.values)} == {"a"}
        want = derivative(kind, function, len(args))
    assert_close(ran.values, jax.jit(want)(*split, *whole), rtol=1e-4, atol=1e-4)


# Of q, k and v, and what else is split by heads, with its axis of heads.
HEADS = {
    "attention": (
        lambda q, k, v, b, s: attention(q, k, v, bias=b, alibi_slopes=jax.lax.stop_gradient(s), causal=True),
        [(QUEUES, 2), (QUEUES + 1, 2), (QUEUES, 2), (normal(EXAMPLES, 4, 12, 12), 1), (np.ones(4, np.float32), 0)],
        [],
    ),
    "attention, keys for all heads": (attention, [(QUEUES, 2)], [ONE, ONE + 1]),
    "decode_attention": (
        lambda q, k, v: ops.decode_attention(q, k, v, LENGTHS),
        [(QUEUES[:, 0], 1), (QUEUES, 2), (QUEUES + 1, 2)],
        [],
    ),
    "rotary_embedding": (ops.rotary_embedding, [(QUEUES, 2)], list(TABLE)),
    "attention, two queries for each key": (
        lambda q, k, v, b, s: attention(q, k, v, bias=b, alibi_slopes=jax.lax.stop_gradient(s), causal=True),
        [(EIGHT, 2), (QUEUES, 2), (QUEUES + 1, 2), (normal(8, 12, 12), 0), (np.ones(8, np.float32), 0)],
        [],
    ),
    "attention, dropout, two queries for each key": (
        lambda q, k, v: attention(q, k, v, dropout=0.3, key=jax.random.split(jax.random.key(0), EXAMPLES)),
        [(EIGHT, 2), (QUEUES, 2), (QUEUES + 1, 2)],
        [],
    ),
    "decode_attention, int8, two queries for each key": (
        lambda q, s: ops.decode_attention(q, QUEUES8, QUEUES8, LENGTHS, k_scale=s, v_scale=s),
        [(EIGHT[:, 0], 1), (np.abs(normal(EXAMPLES, 12, 4)), 2)],
        [],
    ),
    "cache_append": (
        lambda cache, rows: ops.cache_append(cache, rows, LENGTHS, batch_dims=1),
        [(QUEUES, 2), (QUEUES[:, :2] + 1, 2)],
        [],
    ),
    "swiglu": (ops.swiglu, [(normal(EXAMPLES, 8), 1), (normal(EXAMPLES, 8) + 1, 1)], []),
    "linear": (
        lambda w, b, x: ops.linear(x, w, b),
        [(normal(192, 128), 0), (normal(192), 0)],
        [normal(EXAMPLES, 128)],
    ),
    "quantized_linear": (
        lambda scale, x: ops.quantized_linear(x, BLOCKS, encoding="Q8_0") * scale[None],
        [(normal(64), 0)],
        [normal(EXAMPLES, 64)],
    ),
}


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("kind", ["value", "grad", "jvp"])
@pytest.mark.parametrize("name", HEADS)
def test_heads_and_features(name, kind, axes):
    """As a model has them whose weights are split between devices."""
    function, split, whole = HEADS[name]
    mesh = mesh_of(4, kind=axes)
    wanted = derivative(kind, function, len(split) + len(whole))
    with jax.set_mesh(mesh):
        args = [put(x, mesh, *[None] * axis, "a") for x, axis in split] + [put(x, mesh) for x in whole]
        ran = run(wanted, *args)
        # The gradient of x is a product of XLA's, with weights that are whole here.
        assert ran.gathers == 0 or (name, kind) == ("quantized_linear", "grad")
        if kind == "grad" and axes == AxisType.Explicit:
            assert [jax.typeof(x) for x in ran.values] == [jax.typeof(x) for x in args]
    assert_close(ran.values, jax.jit(wanted)(*map(np.asarray, args)), rtol=1e-4, atol=1e-3)


def test_fewer_heads_of_keys_than_devices():
    """Then the queries that share one are on several devices, and are gathered."""
    mesh = mesh_of(4)
    args = put(QUEUES, mesh, None, None, "a"), put(FEW, mesh), put(FEW + 1, mesh)
    ran = run(attention, *args)
    assert ran.gathers > 0
    assert_close(ran.values, attention(QUEUES, FEW, FEW + 1))
