"""XLA's programs for a GPU of ops that have no kernel of ours there: products of 16 bits, and no loop over small blocks."""

import re

import jax
import jax.numpy as jnp
import pytest

from benchmarks.programs import struct
from eqxcallback import ops, xla


BF16, F32, INT8 = jnp.bfloat16, jnp.float32, jnp.int8
LONGER = struct(2, 1024, 2, 1280, dtype=BF16)
LONG, LONG_KV = struct(2, 1024, 8, 320, dtype=BF16), struct(2, 1024, 2, 320, dtype=BF16)
X = struct(256, 512, dtype=BF16)


def products(compiled):
    """The types of the operands of each."""
    types = dict(re.findall(r"%(\S+) = \(?(\w+)\[", compiled.hlo_text))
    pairs = re.findall(r" (?:dot|custom-call)\(%([^,)]+), %([^,)]+)[^)]*\), .*contracting_dims", compiled.hlo_text)
    return [tuple(types[name] for name in pair) for pair in pairs]


def attention(**options):
    return lambda q, k, v: ops.attention(q, k, v, **options)


def decode(q, k, v, length):
    return ops.decode_attention(q, k, v, length, window=100)


def losses(x, weight, labels):
    return ops.linear_cross_entropy(x, weight, labels)


def quantized(x, blocks, **options):
    return ops.quantized_linear(x, blocks, encoding="Q4_1", **options)


CASES = {
    "attention, window": (attention(causal=True, window=256), (LONG, LONG_KV, LONG_KV)),
    "attention, soft cap": (attention(soft_cap=3.0), (LONG, LONG_KV, LONG_KV)),
    "decode_attention, window": (decode, (struct(2, 8, 1280, dtype=BF16), LONGER, LONGER, struct(2, dtype=jnp.int32))),
    "linear_cross_entropy": (losses, (X, struct(32_000, 512, dtype=BF16), struct(256, dtype=jnp.int32))),
    "quantized_linear, many rows": (quantized, (X, struct(1024, 320, dtype=jnp.uint8))),
    "int8_linear": (ops.int8_linear, (X, struct(1024, 512, dtype=INT8), struct(1024))),
}


@pytest.mark.parametrize("derivative", [False, True], ids=["value", "gradients"])
@pytest.mark.parametrize("name", CASES)
def test_products_of_16_bits(name, derivative):
    function, args = CASES[name]
    if derivative:
        numbers = tuple(i for i, arg in enumerate(args) if jnp.issubdtype(arg.dtype, jnp.floating))
        function = jax.grad(lambda *args: CASES[name][0](*args).astype(F32).sum(), numbers)
    compiled = xla.compile_deviceless(function, *args)
    assert set(products(compiled)) == {("bf16", "bf16")}
    assert " while(" not in compiled.hlo_text


def test_integers():
    """Both are int8: so is the product."""
    args = X, struct(1024, 512, dtype=INT8), struct(1024)
    compiled = xla.compile_deviceless(lambda *args: ops.int8_linear(*args, activations="int8"), *args)
    assert products(compiled) == [("s8", "s8")]


def test_few_rows_are_a_kernel_of_ours():
    compiled = xla.compile_deviceless(quantized, struct(8, 512, dtype=BF16), struct(1024, 320, dtype=jnp.uint8))
    assert "eqxcallback_launch" in compiled.hlo_text
    assert not products(compiled)
