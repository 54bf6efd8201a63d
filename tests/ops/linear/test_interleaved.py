"""Rows side by side: the same weights, multiplied along the lanes."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from eqxcallback import ops

from .. import table
from ..memory import compiled, peak
from . import cases


by_encoding = pytest.mark.parametrize("encoding", cases.INTERLEAVED)


def product(encoding: Any, **options: Any) -> Any:
    return table.quickly_compiled(table.with_options(ops.quantized_linear, encoding=encoding, **options))


def multiplies_bytes(isa):
    return bool({"avx512", "avx512_bf16", "neon_dot", "neon_bf16"} & {isa})


@by_encoding
@pytest.mark.parametrize("layers", [(), (2,), (0,)])
@pytest.mark.parametrize("put", [jnp.asarray, np.asarray])
def test_the_bytes_are_where_the_layout_says(layers, put, encoding):
    """Row `r` of group `g`: its scale, perhaps its minimum, and four bytes and four bytes, of each block."""
    rows, count, separate = 48, 3, ops.DEINTERLEAVED[encoding]
    size, halves = (20, 2) if separate == "Q4_1" else (34, 1)
    blocks = np.random.default_rng(0).integers(0, 256, (*layers, rows, size * count), np.uint8)
    got = ops.interleave_rows(put(blocks), encoding=separate)
    assert isinstance(got, jax.Array)
    assert got.shape == blocks.shape
    groups = np.asarray(got).reshape(-1, count, 16 * size)
    for i, row in enumerate(blocks.reshape(-1, count, size)):
        group, r = groups[i // 16], i % 16
        for half in range(halves):
            np.testing.assert_array_equal(group[:, 32 * half + 2 * r :][:, :2], row[:, 2 * half :][:, :2])
        for four in range((size - 2 * halves) // 4):
            at = 32 * halves + 64 * four + 4 * r
            np.testing.assert_array_equal(group[:, at : at + 4], row[:, 2 * halves + 4 * four :][:, :4])
    np.testing.assert_array_equal(ops.deinterleave_rows(got, encoding=encoding), blocks)
    np.testing.assert_array_equal(ops.dequantize(got, encoding=encoding), ops.dequantize(blocks, encoding=separate))


@by_encoding
@pytest.mark.parametrize("activations", ["exact", "int8"])
@pytest.mark.parametrize("rows", [1, 2, 6, 8, 9, 25])
def test_products_are_those_of_the_values(rows, activations, isa, encoding):
    """By the sizes of scale and minimum, which may cancel."""
    blocks, x = cases.blocks(1, 48, 1056, encoding), jnp.asarray(table.normal(2, (rows, 1056)))
    got = np.asarray(product(encoding, activations=activations)(x, blocks), np.float64)
    weights = np.asarray(ops.dequantize(blocks, encoding=encoding), np.float64)
    if activations == "int8":
        want = ops.quantized_linear(x, blocks, encoding=encoding, activations="int8", implementation="reference")
        table.tolerate(got.astype(np.float32), np.asarray(want), 1056)
    else:
        sizes = np.abs(x).sum(-1, dtype=np.float64)[:, None] * np.abs(weights).max()
        assert (np.abs(got - np.asarray(x, np.float64) @ weights.T) <= 1e-6 * sizes).all()


@by_encoding
@pytest.mark.parametrize("activations", ["exact", "int8"])
@pytest.mark.parametrize("value", [None, np.nan, np.inf, 3e38])
def test_each_row_gets_what_it_gets_alone(value, activations, isa, encoding):
    """Bit by bit: any number of them where bytes are multiplied, and else up to 8. Few rows, and more than a pass has."""
    blocks, x = cases.blocks(1, 32, 96, encoding), np.array(table.normal(2, (903, 96)))
    x = x if multiplies_bytes(isa) else x[:8]
    if value is not None:
        x = x[: min(len(x), 20)]
        x[1, 40] = value
    call = product(encoding, activations=activations)
    got = np.asarray(call(x, blocks))
    some = [0, 1, 2, 5, 7, len(x) - 1]
    np.testing.assert_array_equal(got[some], [call(x[i], blocks) for i in some])
    others = np.arange(len(x)) != 1
    assert np.isfinite(got[others]).all()
    if value is not None and not np.isfinite(value):
        want = ops.quantized_linear(
            x[:2], blocks, encoding=encoding, activations=activations, implementation="reference"
        )
        np.testing.assert_array_equal(np.isnan(got[1]), np.isnan(want[1]))


@by_encoding
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_scale_that_is_not_finite_spoils_its_row_alone(value, isa, encoding):
    separate = ops.DEINTERLEAVED[encoding]
    blocks = np.array(cases.blocks(1, 32, 64, separate))
    blocks[20, :2] = np.array([value], np.float16).view(np.uint8)
    x = table.normal(2, (3, 64))
    got = np.isfinite(product(encoding)(x, ops.interleave_rows(blocks, encoding=separate)))
    np.testing.assert_array_equal(got, np.broadcast_to(np.arange(32) != 20, (3, 32)))


@by_encoding
@pytest.mark.parametrize("batch", [(), (2,), (40,)])
def test_weights_are_never_expanded(batch, isa, encoding):
    size = 2048
    blocks = jnp.ones((size, size // 32 * ops.ENCODINGS[encoding]), jnp.uint8)
    x = jnp.ones((*batch, size))
    program = compiled(lambda x, blocks: ops.quantized_linear(x, blocks, encoding=encoding), x, blocks)
    assert f"[{size},{size}]" not in program.as_text()
    assert peak(program, x, blocks) < 4 * size * size / 8


@by_encoding
def test_gradients_and_batches_are_those_of_the_rows_apart(encoding):
    separate = ops.DEINTERLEAVED[encoding]
    blocks, x = jnp.asarray(cases.blocks(1, 32, 96, separate)), jnp.asarray(table.normal(2, (3, 2, 96)))

    def loss(x, blocks, encoding):
        return jnp.sum(jnp.tanh(jax.vmap(lambda x: ops.quantized_linear(x, blocks, encoding=encoding))(x)))

    got = jax.jit(jax.grad(loss), static_argnums=2)(x, ops.interleave_rows(blocks, encoding=separate), encoding)
    np.testing.assert_allclose(got, jax.grad(loss)(x, blocks, separate), rtol=1e-4, atol=1e-5)


def test_an_exported_program():
    blocks, x = jnp.asarray(cases.blocks(1, 32, 96, "Q8_0_R16")), jnp.asarray(table.normal(2, (3, 96)))
    call = jax.jit(lambda x, blocks: ops.quantized_linear(x, blocks, encoding="Q8_0_R16"))
    checks = [jax.export.DisabledSafetyCheck.custom_call("eqxcallback_quantized_linear")]
    data = jax.export.export(call, disabled_checks=checks)(x, blocks).serialize()
    np.testing.assert_array_equal(jax.export.deserialize(data).call(x, blocks), call(x, blocks))


@by_encoding
def test_rows_on_several_devices(encoding):
    """Whole groups of 16 on each of them."""
    blocks, x = cases.blocks(1, 64, 96, encoding), table.normal(2, (3, 96))
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    assert mesh.size == 2
    split = jax.shard_map(
        lambda x, blocks: ops.quantized_linear(x, blocks, encoding=encoding),
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("d")),
        out_specs=PartitionSpec(None, "d"),
    )
    np.testing.assert_array_equal(jax.jit(split)(x, blocks), product(encoding)(x, blocks))


def test_what_is_refused():
    r16: Any = "Q4_1_R16"
    rows = "uint8 blocks of a multiple of 16 rows, with a multiple of"
    of_q4, of_q8 = f"{rows} 20 bytes in each", f"{rows} 34 bytes in each"
    for call, message in (
        (
            lambda: ops.interleave_rows(jnp.zeros((8, 20), jnp.uint8), encoding="Q4_1"),
            rf"interleave_rows: expected {of_q4} \(Q4_1\); got",
        ),
        (
            lambda: ops.interleave_rows(jnp.zeros((16, 20), jnp.uint8), encoding="Q8_0"),
            rf"interleave_rows: expected {of_q8} \(Q8_0\); got",
        ),
        (
            lambda: ops.interleave_rows(jnp.zeros((16, 20), jnp.uint8), encoding=r16),
            "interleave_rows: expected encoding to be one of Q4_1, Q8_0; got 'Q4_1_R16'",
        ),
        (lambda: ops.deinterleave_rows(jnp.zeros((16, 20)), encoding=r16), "deinterleave_rows: expected uint8"),
        (
            lambda: ops.deinterleave_rows(jnp.zeros((16, 34), jnp.uint8), encoding=r16),
            rf"deinterleave_rows: expected {of_q4} \(Q4_1_R16\)",
        ),
        (lambda: ops.dequantize(jnp.zeros(320, jnp.uint8), encoding=r16), rf"dequantize: expected {of_q4} \({r16}\)"),
        (
            lambda: ops.quantized_linear(jnp.zeros(32), jnp.zeros((24, 34), jnp.uint8), encoding="Q8_0_R16"),
            rf"quantized_linear: expected {of_q8} \(Q8_0_R16\); got blocks: uint8\[24,34\]",
        ),
        (lambda: ops.quantize(jnp.zeros((16, 32)), encoding="Q8_0_R16"), "Pass blocks of Q8_0 to interleave_rows"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    refusal = re.escape("it has the encodings Q4_1 and Q8_0; this is Q4_1_R16")
    blocks = cases.blocks(1, 32, 96, r16)
    with pytest.raises(Exception, match=refusal):
        ops.quantized_linear(jnp.zeros(96), blocks, encoding=r16, implementation="python")
