"""XLA's programs for a GPU of ops that have no kernel of ours there: products of 16 bits, and no loop over small blocks."""

import functools
import re
from typing import get_args

import jax
import jax.numpy as jnp
import pytest

from benchmarks.programs import struct
from eqxcallback import ops, xla
from eqxcallback.inspection import _hlo


BF16, F16, F32, F64, INT8 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64, jnp.int8
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


def with_more(names):
    """Attention with options that are arrays, by their names."""
    return lambda q, k, v, *more: ops.attention(q, k, v, **dict(zip(names, more, strict=True)))


def blocks(encoding):
    """The types of 1024 rows of 512 weights."""
    return struct(1024, 512 // (256 if encoding.endswith("_K") else 32) * ops.ENCODINGS[encoding], dtype=jnp.uint8)


LONGER, LONG, LONG_KV = struct(2, 1024, 2, 1280), struct(2, 1024, 8, 320), struct(2, 1024, 2, 320)
SHORT, SHORT_KV = struct(2, 1024, 8, 64), struct(2, 1024, 2, 64)
CASES = {
    "attention, window": (attention(causal=True, window=256), (LONG, LONG_KV, LONG_KV)),
    "decode_attention, window": (decode, (struct(2, 8, 1280), LONGER, LONGER, struct(2, dtype=jnp.int32))),
    "linear_cross_entropy": (losses, (X, struct(32_000, 512), struct(256, dtype=jnp.int32))),
    "int8_linear": (ops.int8_linear, (X, struct(1024, 512, dtype=INT8), struct(1024, dtype=F32))),
    "quantized_linear, many rows": (functools.partial(ops.quantized_linear, encoding="Q4_1"), (X, blocks("Q4_1"))),
}
# One dtype is enough: what they have beside the cases above does not depend on it.
IN_BF16 = {
    "attention, soft cap": (attention(soft_cap=3.0), (LONG, LONG_KV, LONG_KV)),
    **{
        f"attention, {name}": (with_more([name]), (LONG, LONG_KV, LONG_KV, operand))
        for name, operand in {
            "bias": struct(8, 1024, 1024),
            "mask": struct(1024, 1024, dtype=jnp.bool_),
            "alibi_slopes": struct(8, dtype=F32),
            "segment_ids": struct(2, 1024, dtype=jnp.int32),
            "lengths": struct(2, dtype=jnp.int32),
        }.items()
    },
    **{
        f"quantized_linear, many rows, {encoding}": (
            functools.partial(ops.quantized_linear, encoding=encoding),
            (X, blocks(encoding)),
        )
        for encoding in get_args(ops.Encoding)
        if encoding != "Q4_1"
    },
    "quantized_linear, integers": (
        functools.partial(ops.quantized_linear, encoding="Q8_0", activations="int8"),
        (X, blocks("Q8_0")),
    ),
}
# Triton and cuDNN have no f64.
IN_F64 = {"attention": (attention(causal=True), (SHORT, SHORT_KV, SHORT_KV))}
OF_EACH_DTYPE = [
    *((name, dtype) for name in CASES for dtype in (BF16, F16, F32, F64) if (name[:9], dtype) != ("quantized", F64)),
    *((name, BF16) for name in IN_BF16),
    *((name, F64) for name in IN_F64),
]


@pytest.mark.parametrize(("name", "dtype"), OF_EACH_DTYPE, ids=str)
def test_products_of_the_dtype(name, dtype):
    """Results and gradients multiply what has 16 bits as it is, f32 as precisely as the program around them, and f64 in f64."""
    function, args = (CASES | IN_BF16 | IN_F64)[name]
    args = [struct(*arg.shape, dtype=dtype) if arg.dtype == BF16 else arg for arg in args]
    numbers = tuple(i for i, arg in enumerate(args) if jnp.issubdtype(arg.dtype, jnp.floating))
    loss = jax.value_and_grad(lambda *args: function(*args).astype(F32).sum(), numbers)
    with jax.enable_x64(dtype == F64):
        compiled = xla.compile_deviceless(loss, *args)
    kind = {BF16: "bf16", F16: "f16", F32: "f32", F64: "f64"}[dtype]
    assert set(products(compiled)) == {(kind, kind)}
    assert "operand_precision={highest" not in compiled.hlo_text
    assert " while(" not in compiled.hlo_text


# Triton computes the value.
DERIVED = {**IN_F64, **CASES}


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


def test_gradients_of_integers():
    """The gradient of the scales multiplies integers, and that of activations what has 16 bits."""
    args = X, struct(1024, 512, dtype=INT8), struct(1024)
    compiled = xla.compile_deviceless(
        jax.grad(lambda *args: ops.int8_linear(*args, activations="int8").astype(F32).sum(), (0, 2)), *args
    )
    assert sorted(products(compiled)) == [("bf16", "bf16"), ("s8", "s8")]
    assert " while(" not in compiled.hlo_text


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
