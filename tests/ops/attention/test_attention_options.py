"""Every option of attention, alone and with others, on every instruction set, against a plain loop over heads."""

import functools
import os
import subprocess
import sys
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies

from eqxcallback import ops
from eqxcallback.ops.attention._reference_dropout import counters, kept

from .. import table
from ..table import normal
from . import options
from .options import exact


pytestmark = pytest.mark.any_jax_version

by_option = pytest.mark.parametrize("name", options.NAMES)
by_implementation = pytest.mark.parametrize("implementation", ["auto", "reference"])
# A plain block and blocks in a loop of the reference; less and more than blocks of the kernel; queries before all keys.
SHAPES = [(5, 9, 4, 2, 6), (70, 150, 2, 1, 17), (150, 40, 3, 3, 8)]
BY_TILES = (70, 140, 2, 1, 32)  # of f32 too, where a table has them


@pytest.mark.parametrize(
    ("shape", "name"),
    [*[(SHAPES[0], name) for name in options.NAMES], (SHAPES[1], "all"), (SHAPES[2], "causal window")],
    ids=str,
)
def test_values_of_the_definition(shape, name):
    args, given = options.inputs(*shape), options.options(*shape[:3])[name]
    f = table.quickly_compiled(lambda *args: ops.attention(*args, implementation="reference", **given))
    np.testing.assert_allclose(f(*args), exact(*args, **given), rtol=2e-5, atol=1e-5)


@functools.cache
def called(shape, name, dtype=table.DTYPES[0]):
    """Operands, one program for all instruction sets, and what it has to return."""
    args, given = options.inputs(*shape, dtype=dtype), options.options(*shape[:3])[name]
    return args, table.quickly_compiled(lambda *args: ops.attention(*args, **given)), exact(*args, **given)


@by_option
def test_values(name, isa):
    for shape in [*SHAPES, BY_TILES]:
        args, f, want = called(shape, name)
        np.testing.assert_allclose(f(*args), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["window", "all"])
def test_values_of_bf16(name, isa):
    args, f, want = called(SHAPES[1], name, table.DTYPES[1])
    np.testing.assert_allclose(np.asarray(f(*args), np.float32), want, rtol=2**-8, atol=1e-4)


@functools.cache
def defined(shape, name):
    """Operands, options, one program of gradients for all instruction sets, and those of the reference."""
    args, given = options.inputs(*shape), options.options(*shape[:3])[name]
    return args, given, options.gradients_with(given, "auto"), options.gradients(args, given, "reference")


@by_option
def test_gradients(name, isa):
    """The gradients of less than a block, and of several blocks; heads that share keys."""
    for shape in SHAPES[:2]:
        args, _, f, want = defined(shape, name)
        for got, wanted in zip(f(*args), want, strict=True):
            assert got.dtype == wanted.dtype
            got, wanted = np.asarray(got, np.float32), np.asarray(wanted, np.float32)
            np.testing.assert_allclose(got, wanted, rtol=1e-2 if "bf16" in name else 1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["causal window", "all"])
def test_gradients_of_bf16(name, isa):
    wide, _, f, want = defined(SHAPES[1], name)
    got = f(*(x.astype(table.DTYPES[1]) for x in wide))
    for one, wanted in zip(got[:3], want[:3], strict=True):
        scale = np.abs(np.asarray(wanted)).max()
        np.testing.assert_allclose(np.asarray(one, np.float32), wanted, rtol=0.1, atol=0.03 * scale)


@pytest.mark.parametrize(
    "kind", ["causal", "reversed", "band", "ends", "holes", "some queries", "nothing", "everything"]
)
def test_masks_that_hide_blocks(kind, isa):
    args, f, of_f, value, wants = masked(kind)
    np.testing.assert_allclose(f(*args), value, rtol=1e-5, atol=1e-5)
    for gradient, want in zip(of_f(*args), wants, strict=True):
        np.testing.assert_allclose(gradient, want, rtol=1e-4, atol=2e-5)


@functools.cache
def masked(kind):
    """Operands, two programs for all instruction sets, of values and gradients, and what they have to return."""
    args, given = options.inputs(150, 400, 2, 1, 17), {"mask": options.hiding(kind, 150, 400)[None]}
    f = table.quickly_compiled(lambda *args: ops.attention(*args, **given))
    return (
        args,
        f,
        options.gradients_with(given, "auto"),
        exact(*args, **given),
        options.gradients(args, given, "reference"),
    )


def test_keys_that_a_mask_hides_at_the_ends_are_not_read(isa):
    """Numbers that would be seen even where a weight of zero multiplies them."""
    q, k, v = options.inputs(70, 300, 2, 1, 17)
    mask = (options.hiding("ends", 70, 300) & (np.arange(300) < 290))[None]
    poisoned = tuple(np.where(mask[0, 0, :, None, None], x, np.nan) for x in (k, v))
    f = table.quickly_compiled(lambda *args: ops.attention(*args, mask=mask))
    np.testing.assert_array_equal(f(q, *poisoned), f(q, k, v))
    of_f = options.gradients_with({"mask": mask}, "auto")
    for gradient, want in zip(of_f(q, *poisoned), of_f(q, k, v), strict=True):
        np.testing.assert_array_equal(gradient, want)


def test_gradients_against_finite_differences():
    """The gradients of the loop over heads, in f64, along a direction of all operands."""
    shape = SHAPES[0]
    args, given, *_ = defined(shape, "all")
    finite = {**given, "bias": np.where(np.isinf(given["bias"]), -3.0, given["bias"])}
    got = options.gradients(args, finite, "auto")
    weights = normal(9, args[0].shape).astype(np.float64)
    directions = [normal(i, x.shape, np.float64) for i, x in enumerate(got)]

    def at(step):
        moved = [x + step * d for x, d in zip((*args, finite["bias"], finite["alibi_slopes"]), directions, strict=True)]
        return (weights * exact(*moved[:3], **{**finite, "bias": moved[3], "alibi_slopes": moved[4]})).sum()

    slope = sum(np.sum(np.asarray(x, np.float64) * d) for x, d in zip(got, directions, strict=True))
    np.testing.assert_allclose(slope, (at(1e-5) - at(-1e-5)) / 2e-5, rtol=1e-4)


@pytest.mark.parametrize("more", [{}, {"window": None}, {"soft_cap": None}, {"window": 1}, {"window": 300}], ids=str)
@pytest.mark.parametrize("int8", [False, True], ids=["", "int8"])
def test_one_token(more, int8, isa):
    """One token with caches of one part and of several, of which the window ends where parts do not."""
    for keys in (9, 700):
        case, want = one_token(keys, int8, tuple(more.items()))
        table.tolerate(table.quickly_compiled(case.op)(*case.args), want, 9 * case.terms)


@functools.cache
def one_token(keys, int8, more):
    case = options.decode_case((3,), keys, int8, **dict(more))
    return case, case.want()


def test_one_token_is_the_last_query():
    q, k, v = options.inputs(1, 9, 4, 2, 6)
    given: Any = {"window": 3, "soft_cap": 2.0, "alibi_slopes": np.ones(4, np.float32)}
    got = ops.decode_attention(q[0], k, v, 7, **given)
    np.testing.assert_allclose(got, exact(q, k[:7], v[:7], causal=True, **given)[0], atol=1e-5)


few = hypothesis.settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
numbers = strategies.integers


@few
@hypothesis.given(
    numbers(0, 70),
    numbers(1, 300),
    numbers(0, 20),
    strategies.booleans(),
    numbers(1, 200),
    numbers(-90, 300),
    numbers(-3, 320),
)
def test_places_of_any_kind(isa, queries, keys, size, causal, window, offset, length):
    args = options.inputs(queries, keys, 2, 1, size)
    given = {"causal": causal, "window": window, "offset": offset, "lengths": length, "scale": 0.5}
    f = table.quickly_compiled(lambda *args: ops.attention(*args, **given))
    np.testing.assert_allclose(f(*args), exact(*args, **given), rtol=1e-5, atol=1e-5)


PROGRAM = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))} if sys.argv[1] == "1" else os.sched_getaffinity(0))
import hashlib, jax, jax.numpy as jnp, numpy as np
from eqxcallback import ops

q, k, v, bias = (np.random.default_rng(i).standard_normal(s).astype(np.float32) for i, s in enumerate(
    [(2, 150, 3, 8), (2, 300, 1, 8), (2, 300, 1, 8), eval(sys.argv[2])]))
f = lambda q, k, v, bias, slopes: jnp.sin(ops.attention(q, k, v, bias=bias, alibi_slopes=slopes, causal=True)).sum()
found = jax.jit(jax.grad(f, (0, 1, 2, 3, 4)))(q, k[:2], v, bias, np.ones(3, np.float32))
print(hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in found)).hexdigest())
"""


@pytest.mark.parametrize("bias", [(1, 150, 300), (2, 1, 1, 300)], ids=str)
def test_any_number_of_threads_gives_the_same_bits(bias):
    """One computes each tile once, several make one pass along the queries and one along the keys."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    runs = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM, threads, str(bias)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for threads in ("1", "all")
    ]
    assert runs[0] == runs[1]


@by_implementation
def test_a_query_that_sees_nothing_gives_zeros_and_has_no_gradients(implementation):
    q, k, v = options.inputs(70, 9, 2, 1, 4)
    mask = np.ones((1, 70, 9), bool)
    mask[:, 3] = False

    def f(q, k, v, bias):
        return ops.attention(q, k, v, mask=mask, bias=bias, implementation=implementation)

    def gradient(*args):
        return jax.grad(lambda *args: (f(*args) ** 2).sum(), (0, 1, 2, 3))(*args)

    def second(*args):
        return jax.grad(lambda *args: sum(jnp.sin(x).sum() for x in gradient(*args)), (0, 1, 2, 3))(*args)

    args: Any = (q, k, v, np.zeros((2, 70, 9), np.float32))
    value, *derivatives = table.quickly_compiled(lambda *args: (f(*args), gradient(*args), second(*args)))(*args)
    assert (np.asarray(value)[3] == 0).all()
    for leaves in derivatives:
        assert (np.asarray(leaves[0])[3] == 0).all()
        assert (np.asarray(leaves[3])[:, 3] == 0).all()
        assert all(np.isfinite(x).all() for x in leaves)


@by_implementation
def test_large_logits(implementation):
    q, k, v = options.inputs(9, 20, 2, 1, 4)
    q, k = 1e2 * q, 1e2 * k
    choices: Any = ({"window": 5}, {"bias": np.full((1, 9, 20), 1e4, np.float32)}, {"lengths": 7})
    for given in choices:
        f = table.quickly_compiled(
            lambda *args, given=given: ops.attention(*args, implementation=implementation, **given)
        )
        got = f(q, k, v)
        np.testing.assert_allclose(got, exact(q, k, v, **given), rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("implementation", ["native", "python", "reference"])
def test_padding_may_be_anything(implementation):
    """In memory that nobody wrote to it may be NaN, which no weight of zero hides."""
    lengths = np.array([0, 5, 9], np.int32)
    q, k, v = (np.stack([x] * 3) for x in options.inputs(70, 9, 2, 1, 4))
    padding = np.arange(9)[:, None, None] >= lengths[:, None, None, None]

    def results(filling):
        def attend(q, k, v, length):
            one = ops.decode_attention(q[0], k, v, length, implementation=implementation)
            return ops.attention(q, k, v, lengths=length, implementation=implementation).at[0].add(one)

        keys, values = (jnp.where(padding, filling, x) for x in (k, v))
        out, pull = jax.vjp(lambda q, k, v: jax.vmap(attend)(q, k, v, lengths), q, keys, values)
        return out, *pull(jnp.cos(out))

    got, want = map(table.quickly_compiled(results), np.array([np.nan, 0.0], np.float32))
    for value, other in zip(got, want, strict=True):
        assert np.isfinite(value).all()
        np.testing.assert_array_equal(value, other)


@pytest.mark.parametrize("bias", [-1e9, np.finfo(np.float32).min, 1e9])
def test_gradients_of_queries_whose_logits_are_all_alike_far_away(bias, isa):
    """As where a padded example is masked with a large number: its queries see all keys alike."""
    q, k, v = options.inputs(70, 40, 2, 1, 4)
    given: Any = np.zeros((1, 70, 40), np.float32)
    given[:, 3] = bias
    got, want = (gradients_with_bias(implementation, q, k, v, given) for implementation in ("native", "reference"))
    for gradient, wanted in zip(got, want, strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-5)


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.grad, argnums=(1, 2, 3, 4))
def gradients_with_bias(implementation, q, k, v, bias):
    return jnp.sin(ops.attention(q, k, v, bias=bias, implementation=implementation)).sum()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_gradients_beside_a_key_that_is_not_finite(value, isa):
    """With few queries, the rows of a block beyond them add nothing."""
    given: dict[str, Any] = dict(zip("qkv", options.inputs(5, 9, 2, 2, 8), strict=True))
    given["k"][3] = value
    got, want = (gradients_beside_key_3(implementation, given) for implementation in ("native", "reference"))
    for name in "qkv":
        finite = np.isfinite(want[name])
        np.testing.assert_allclose(np.asarray(got[name])[finite], np.asarray(want[name])[finite], rtol=1e-4, atol=1e-5)


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.grad, argnums=1)
def gradients_beside_key_3(implementation, args):
    segments = np.zeros(5, np.int32), np.zeros(9, np.int32)
    segments[1][3] = 1
    out = ops.attention(**args, segment_ids=segments, implementation=implementation)
    return jnp.where(jnp.isfinite(out), jnp.sin(out), 0).sum()


# Dropout.


@pytest.mark.parametrize("dropout", [1e-4, 0.1, 1 / 3, 0.5, 0.9, 0.999])
def test_rows_of_what_dropout_keeps(dropout):
    key = jax.random.key(3)
    want = jax.random.bernoulli(key, 1 - dropout, (37, 53))
    got = jax.jit(lambda key: kept(key, jnp.arange(5, 20), 53, dropout))(jax.random.key_data(key))
    np.testing.assert_array_equal(got, want[5:20])


@pytest.mark.parametrize("columns", [1, 1000, 70001, 2**20 + 7])
def test_counters_of_more_than_32_bits(columns):
    rows = np.array([0, 1, 70000, *([2**31 - 5] if columns < 10**5 else [])])
    high, low = counters(jnp.asarray(rows, jnp.int32), columns)
    want = rows[:, None].astype(np.uint64) * np.uint64(columns) + np.arange(columns, dtype=np.uint64)
    np.testing.assert_array_equal(high, want >> np.uint64(32))
    np.testing.assert_array_equal(low, want & np.uint64(2**32 - 1))


def dropped(q, k, v, key):
    return table.quickly_compiled(lambda *args: ops.attention(*args[:3], dropout=0.3, key=args[3]))(q, k, v, key)


def test_dropout_with_keys_of_each_kind():
    """A key of JAX's old form, and one of another generator, whose numbers under `vmap` are its own."""
    q, k, v = options.inputs(5, 9, 2, 1, 4)
    want = dropped(q, k, v, jax.random.key(7))
    np.testing.assert_array_equal(dropped(q, k, v, jax.random.PRNGKey(7)), want)
    with jax.threefry_partitionable(False):
        key = jax.random.key(7)
        np.testing.assert_allclose(dropped(q, k, v, key), exact(q, k, v, dropout=0.3, key=key), atol=1e-5)
    key = jax.random.key(7, impl="rbg")
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, (5, 9)))(jax.random.split(key, 2))
    weights = dropped(q, k, np.eye(9, 4, dtype=np.float32)[:, None], key)
    np.testing.assert_array_equal(np.asarray(weights) != 0, np.moveaxis(np.asarray(keep), 0, 1)[..., :4])


def test_dropout_of_64_bits(x64):
    for dtype in (np.float32, np.float64):
        q, k, v = options.inputs(5, 9, 2, 1, 4, dtype)
        key = jax.random.key(7)
        got = dropped(q, k, v, key)
        assert got.dtype == dtype
        np.testing.assert_allclose(got, exact(q, k, v, dropout=0.3, key=key), atol=1e-5)


def test_the_same_weights_as_equinox():
    import equinox as eqx

    layer = eqx.nn.MultiheadAttention(2, 8, dropout_p=0.4, key=jax.random.key(0))
    x, key = normal(1, (6, 8)), jax.random.key(2)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        want = layer(x, x, x, key=key)
    heads = [jax.vmap(project)(x).reshape(6, 2, 4) for project in (layer.query_proj, layer.key_proj, layer.value_proj)]
    out = table.quickly_compiled(lambda *args: ops.attention(*args, dropout=0.4, key=key))(*heads)
    got = jax.vmap(layer.output_proj)(out.reshape(6, 8))
    np.testing.assert_allclose(got, want, atol=1e-5)
