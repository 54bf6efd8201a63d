"""XLA's programs for a GPU of ops that have no kernel of ours there: products of 16 bits, and no loop over small blocks."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.programs import struct
from eqxcallback import ops, xla
from eqxcallback.inspection import _hlo


BF16, F16, F32, INT8 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.int8
X = struct(256, 512)


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


ENCODINGS: Any = {"Q4_1": 320, "Q8_0": 544, "Q4_K": 288}
LONGER, LONG, LONG_KV = struct(2, 1024, 2, 1280), struct(2, 1024, 8, 320), struct(2, 1024, 2, 320)
CASES = {
    "attention, window": (attention(causal=True, window=256), (LONG, LONG_KV, LONG_KV)),
    "attention, soft cap": (attention(soft_cap=3.0), (LONG, LONG_KV, LONG_KV)),
    "decode_attention, window": (decode, (struct(2, 8, 1280), LONGER, LONGER, struct(2, dtype=jnp.int32))),
    "linear_cross_entropy": (losses, (X, struct(32_000, 512), struct(256, dtype=jnp.int32))),
    "int8_linear": (ops.int8_linear, (X, struct(1024, 512, dtype=INT8), struct(1024, dtype=F32))),
    **{
        f"quantized_linear, many rows, {encoding}": (
            functools.partial(ops.quantized_linear, encoding=encoding),
            (X, struct(1024, bytes_of_row, dtype=jnp.uint8)),
        )
        for encoding, bytes_of_row in ENCODINGS.items()
    },
}
OF_EACH_DTYPE = [
    *((name, BF16) for name in CASES),
    *((name, dtype) for name in CASES if name[-4:] not in ("Q8_0", "Q4_K", " cap") for dtype in (F16, F32)),
]


@pytest.mark.parametrize(("name", "dtype"), OF_EACH_DTYPE, ids=str)
def test_products_of_the_dtype(name, dtype):
    """Results and gradients multiply what has 16 bits as it is, and f32 as precisely as the program around them."""
    function, args = CASES[name]
    args = [struct(*arg.shape, dtype=dtype) if arg.dtype == BF16 else arg for arg in args]
    numbers = tuple(i for i, arg in enumerate(args) if jnp.issubdtype(arg.dtype, jnp.floating))
    loss = jax.value_and_grad(lambda *args: function(*args).astype(F32).sum(), numbers)
    compiled = xla.compile_deviceless(loss, *args)
    kind = {BF16: "bf16", F16: "f16", F32: "f32"}[dtype]
    assert set(products(compiled)) == {(kind, kind)}
    assert "operand_precision={highest" not in compiled.hlo_text
    assert " while(" not in compiled.hlo_text


SHORT, SHORT_KV = struct(2, 1024, 8, 64), struct(2, 1024, 2, 64)
DERIVED = {
    "attention": (attention(causal=True), (SHORT, SHORT_KV, SHORT_KV)),  # Triton computes the value
    **{name: case for name, case in CASES.items() if name[-4:] not in ("Q8_0", "Q4_K", " cap")},
}


@pytest.mark.parametrize("name", DERIVED)
def test_other_derivatives(name):
    """Forward mode and forward over reverse multiply 16 bits as well, all queries at once."""
    function, args = DERIVED[name]
    numbers = [i for i, arg in enumerate(args) if jnp.issubdtype(arg.dtype, jnp.floating)]

    def program(floats, tangents, args):
        def value(*floats):
            merged = list(args)
            for i, x in zip(numbers, floats, strict=True):
                merged[i] = x
            return function(*merged)

        def gradients(*floats):
            return jax.grad(lambda *floats: value(*floats).astype(F32).sum(), tuple(range(len(floats))))(*floats)

        return [jax.jvp(f, floats, tangents)[1] for f in (value, gradients)]

    floats = tuple(args[i] for i in numbers)
    compiled = xla.compile_deviceless(program, floats, floats, args)
    assert set(products(compiled)) == {("bf16", "bf16")}
    assert "operand_precision={highest" not in compiled.hlo_text
    assert " while(" not in compiled.hlo_text
    assert " conditional(" not in compiled.hlo_text


def test_integers():
    """Both are int8: so is the product."""
    args = X, struct(1024, 512, dtype=INT8), struct(1024)
    compiled = xla.compile_deviceless(lambda *args: ops.int8_linear(*args, activations="int8"), *args)
    assert products(compiled) == [("s8", "s8")]


@pytest.mark.parametrize(("encoding", "size"), [("Q4_1", 320), ("Q6_K", 420)])
def test_few_rows_are_a_kernel_of_ours(encoding, size):
    blocks = struct(1024, size, dtype=jnp.uint8)
    compiled = xla.compile_deviceless(
        lambda x, blocks: ops.quantized_linear(x, blocks, encoding=encoding), struct(8, 512), blocks
    )
    assert "eqxcallback_launch" in compiled.hlo_text
    assert not products(compiled)


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_integers_are_converted_in_the_product(rows):
    """So they are read once, and no kernel of ours would read less."""
    args = struct(rows, 512), struct(1024, 512, dtype=INT8), struct(1024, dtype=F32)
    module = _hlo.Module(xla.compile_deviceless(ops.int8_linear, *args).hlo_text)
    steps = module.computations[module.entry].values()
    assert not [step for step in steps if re.search(r"(bf16|f32)\[(1024,512|512,1024)\]", step.shape)]
    weights = [step.name for step in steps if step.opcode == "parameter" and step.shape.startswith("s8[1024,512]")]
    assert [len(set(weights) & set(step.operands)) for step in steps if set(weights) & set(step.operands)] == [1]
