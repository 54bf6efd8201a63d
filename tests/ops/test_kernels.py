"""Every kernel, on every instruction set of this machine, against its definition."""

import concurrent.futures
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies

from eqxcallback import ops

from . import cases
from .cases import ALL, DTYPES, LARGE, made, name, normal, one_of_each, tolerate


by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.parametrize("make", ALL, ids=lambda make: name(*make))
def test_values(make, isa):
    op, *arguments = make
    number = cases.SHAPES[op].index(tuple(arguments))
    for dtype in DTYPES:
        found, wants = cases.every_case(op, dtype)
        found[number].check(cases.every_result(op, dtype, isa)[number], wants[number])


@by_dtype
@pytest.mark.parametrize("make", LARGE, ids=lambda make: name(*make))
def test_work_for_many_threads(make, dtype, isa):
    case, want = made(dtype, *make)
    case.check(case.op(*case.args), want)


@by_dtype
@pytest.mark.parametrize("index", range(len(one_of_each(DTYPES[0]))))
def test_operands_are_left_as_they_are(index, dtype, isa):
    case = one_of_each(dtype)[index]
    args = [jnp.array(x) for x in case.args]
    jax.block_until_ready(case.op(*args))
    for arg, before in zip(args, case.args, strict=True):
        assert np.asarray(arg).tobytes() == before.tobytes()


def test_calls_from_many_threads_at_once(isa):
    work = [made(dtype, *make) for dtype in DTYPES for make in LARGE if make[0] is not cases.attention]

    def run(worker):
        for offset in range(len(work)):
            case, want = work[(worker + offset) % len(work)]
            case.check(case.op(*case.args), want)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(8)))


# Shapes that nobody thought of.

sizes = strategies.integers(0, 40)
heads = strategies.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2), (6, 2)])
few = hypothesis.settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)


@few
@hypothesis.given(
    sizes, strategies.integers(0, 300), heads, sizes, strategies.booleans(), strategies.sampled_from(DTYPES)
)
def test_attention_of_any_shape(isa, queries, keys, heads, size, causal, dtype):
    case, want = made(dtype, cases.attention, (), queries, keys, *heads, size, causal)
    case.check(case.op(*case.args), want)


@few
@hypothesis.given(
    strategies.sampled_from(list(ops.ENCODINGS)),
    strategies.integers(0, 40),
    strategies.integers(0, 9),
    strategies.integers(0, 70),
    strategies.sampled_from(DTYPES),
)
def test_quantized_linear_of_any_shape(isa, encoding, rows, in_blocks, out_features, dtype):
    case, want = made(dtype, cases.quantized_linear, encoding, (rows,), 32 * in_blocks, out_features)
    case.check(case.op(*case.args), want)


# Other dtypes run the definition.


def test_other_floats(x64):
    for case in one_of_each(np.dtype(np.float64))[:8]:
        got = cases.quickly_compiled(case.op)(*case.args)
        assert got.dtype == np.float64
        np.testing.assert_array_equal(got, cases.quickly_compiled(case.definition)(*case.args))


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.float64, np.complex64, np.uint16])
def test_a_cache_of_any_dtype(dtype, x64):
    case = cases.cache_append(np.float32, (2,), 7, 3, (5,))
    cache, rows = (np.asarray(10 * x).astype(dtype) for x in case.args[:2])
    got = case.op(cache, rows, case.args[2])
    np.testing.assert_array_equal(got, case.definition(*map(jnp.asarray, (cache, rows, case.args[2]))))


# What the definitions themselves are worth.


def test_equinox_and_jax_agree():
    """Attention is `jax.nn.dot_product_attention`; a rotation is one of complex numbers; weights are what GGUF says."""
    q, k, v = normal(1, (2, 5, 4, 8)), normal(2, (2, 5, 2, 8)), normal(3, (2, 5, 2, 8))
    for causal in (True, False):
        got = ops.attention(q, k, v, causal=causal)
        with jax.numpy_rank_promotion("allow"):
            tolerate(got, np.asarray(jax.nn.dot_product_attention(q, k, v, is_causal=causal)), 13)

    x, positions = normal(1, (7, 3, 10)), np.arange(7) * 5
    angles = positions[:, None, None] * 100.0 ** (-np.arange(5) / 5)
    rotated = (x[..., :5] + 1j * x[..., 5:]) * np.exp(1j * angles)
    got = ops.rotary_embedding(x, *ops.rotary_table(jnp.asarray(positions), 10, theta=100.0))
    np.testing.assert_allclose(got, np.concatenate([rotated.real, rotated.imag], -1), atol=2e-5)


def test_dequantize():
    scale, minimum = np.float16(0.5), np.float16(-3)
    digits = np.arange(16, dtype=np.uint8) | (np.arange(16, dtype=np.uint8)[::-1] << 4)
    block: Any = np.concatenate([np.array([scale, minimum]).view(np.uint8), digits])
    want = 0.5 * np.concatenate([np.arange(16), np.arange(16)[::-1]]) - 3
    np.testing.assert_array_equal(ops.dequantize(block, encoding="Q4_1"), want)
    values = np.arange(-128, 128, 8, dtype=np.int8)
    block = np.concatenate([np.array([scale]).view(np.uint8), values.view(np.uint8)])
    np.testing.assert_array_equal(ops.dequantize(block[None], encoding="Q8_0"), 0.5 * values[None].astype(np.float32))
    for encoding, size in cases.ENCODINGS.items():
        assert ops.dequantize(jnp.zeros((2, 0, 3 * size), jnp.uint8), encoding=encoding).shape == (2, 0, 96)
