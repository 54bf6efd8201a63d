"""Sources of weights in blocks, and blocks that stay blocks in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops
from eqxcallback.ops.linear import _reference_quantized as reference_quantized

from ..memory import compiled, peak
from . import cases


@pytest.mark.parametrize(("encoding", "largest"), [("Q8_0", 127 * 65504), ("Q4_1", 65504)])
def test_the_largest_weights_that_blocks_can_be_made_of(encoding, largest):
    """They are what they were. Of larger ones, nobody knows while a program is traced, but of its constants."""
    weight = jnp.full(32, -largest, jnp.float32)
    blocks = ops.quantize(weight, encoding=encoding)
    np.testing.assert_array_equal(ops.dequantize(blocks, encoding=encoding), weight)
    nothing, larger = jnp.full(32, jnp.nan), 2 * weight
    assert np.isnan(ops.dequantize(ops.quantize(nothing, encoding=encoding), encoding=encoding)).all()
    assert ops.quantize(jnp.zeros((0, 32)), encoding=encoding).size == 0
    traced = jax.jit(lambda weight: ops.quantize(weight, encoding=encoding))
    np.testing.assert_array_equal(traced(larger), reference_quantized.quantize(larger, encoding=encoding))
    with pytest.raises(ValueError, match="quantize: expected weight of magnitudes up to"):
        jax.jit(lambda: ops.quantize(larger, encoding=encoding))()
    with pytest.raises(ValueError, match="quantize: expected weight of magnitudes up to"):
        ops.quantize(jnp.concatenate([larger, nothing]), encoding=encoding)


@pytest.mark.parametrize("encoding", cases.ENCODINGS)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_weights_are_never_expanded(encoding, batch, isa):
    in_features, out_features = 4096, 4096
    blocks = jnp.ones((out_features, in_features // 32 * ops.ENCODINGS[encoding]), jnp.uint8)
    x = jnp.ones((*batch, in_features))
    program = compiled(lambda x, blocks: ops.quantized_linear(x, blocks, encoding=encoding), x, blocks)
    assert program.memory_analysis().temp_size_in_bytes < 2**20
    assert f"[{out_features},{in_features}]" not in program.as_text()
    assert peak(program, x, blocks) < 4 * in_features * out_features / 8
