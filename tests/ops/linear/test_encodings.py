"""All encodings of GGUF files: the values of the `gguf` package, and products that never expand the weights."""

import functools
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops

from .. import table
from ..memory import compiled, peak
from . import cases


by_encoding = pytest.mark.parametrize("encoding", [*cases.ENCODINGS, *cases.UNPACKED])
by_unpacked = pytest.mark.parametrize("encoding", cases.UNPACKED)


def theirs(blocks: Any, encoding: str) -> Any:
    return gguf.quants.dequantize(np.asarray(blocks), gguf.GGMLQuantizationType[encoding])


@by_encoding
def test_values_are_those_of_the_gguf_package_bit_by_bit(encoding):
    """Take random bytes: every scale, minimum and digit."""
    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[encoding]]
    assert ops.ENCODINGS[encoding] == size
    blocks = cases.blocks(1, 40, 1024, encoding)
    got = ops.dequantize(blocks, encoding=encoding)
    assert got.shape == (40, 1024)
    np.testing.assert_array_equal(got, theirs(blocks, encoding))
    empty = ops.dequantize(jnp.zeros((2, 0, 3 * size), jnp.uint8), encoding=encoding)
    assert empty.shape == (2, 0, 3 * weights)


@by_unpacked
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 9])
def test_products_are_those_of_the_values(rows, encoding, isa):
    blocks = cases.blocks(1, 19, 512, encoding)
    x = np.asarray(table.normal(2, (rows, 512)), np.float64)
    weights = theirs(blocks, encoding).astype(np.float64)
    got = ops.quantized_linear(jnp.asarray(x, jnp.float32), blocks, encoding=encoding)
    # A minimum and what it is added to may cancel: the sizes of both are added up.
    sizes = np.abs(x) @ np.abs(weights).T + np.abs(x).sum(-1)[:, None] * np.abs(weights).max()
    assert (np.abs(np.asarray(got, np.float64) - x @ weights.T) <= 1e-6 * sizes).all()


@by_unpacked
@pytest.mark.parametrize("value", [None, np.nan, np.inf, 3e38])
def test_each_of_few_rows_gets_what_it_gets_alone(value, encoding, isa):
    blocks, x = cases.blocks(1, 19, 512, encoding), np.array(table.normal(2, (3, 512)))
    if value is not None:
        x[1, 300] = value
    product = table.quickly_compiled(table.with_options(ops.quantized_linear, encoding=encoding))
    got = np.asarray(product(x, blocks))
    np.testing.assert_array_equal(got, [product(row, blocks) for row in x])
    assert np.isfinite(got[[0, 2]]).all()
    if value is not None and not np.isfinite(value):
        touched = theirs(blocks, encoding)[:, 300] != 0
        assert not np.isfinite(got[1][touched]).any()


@by_unpacked
def test_quantized_activations(encoding, isa):
    for rows in (1, 3, 9):
        blocks, x = cases.blocks(1, 19, 512, encoding), table.normal(2, (rows, 512))
        op = functools.partial(ops.quantized_linear, encoding=encoding, activations="int8")
        want = op(x, blocks, implementation="reference")
        table.tolerate(op(x, blocks), np.asarray(want), 512)


@by_unpacked
@pytest.mark.parametrize("batch", [(), (2,)])
def test_weights_are_never_expanded(batch, encoding, isa):
    in_features = out_features = 4096
    weights = cases.UNPACKED[encoding][0]
    blocks = jnp.ones((out_features, in_features // weights * ops.ENCODINGS[encoding]), jnp.uint8)
    x = jnp.ones((*batch, in_features))
    program = compiled(lambda x, blocks: ops.quantized_linear(x, blocks, encoding=encoding), x, blocks)
    assert f"[{out_features},{in_features}]" not in program.as_text()
    assert peak(program, x, blocks) < 4 * in_features * out_features / 8


def test_other_kernels_say_that_they_have_two_encodings():
    blocks, x = cases.blocks(1, 19, 512, "Q4_K"), table.normal(2, (512,))
    with pytest.raises(Exception, match=r"it has the encodings Q4_1 and Q8_0; this is Q4_K"):
        ops.quantized_linear(x, blocks, encoding="Q4_K", implementation="python")


@pytest.mark.parametrize("encoding", cases.UNPACKED)
def test_quantize_says_which_encodings_it_makes(encoding):
    with pytest.raises(ValueError, match=rf"quantize: expected encoding to be one of Q4_1, Q8_0; got '{encoding}'"):
        ops.quantize(jnp.zeros(256), encoding=encoding)
