"""Every op's kernel for GPUs in XLA's plan: captured, and without a copy."""

import jax
import jax.numpy as jnp
import pytest

import eqxcallback as eqxc
from eqxcallback import ops, xla

from .programs import ONE, calls_of, thunks


BF16 = jnp.bfloat16


def struct(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def weight(size):
    return struct(size, dtype=jnp.float32)


KV = (struct(2, 256, 2, 64), struct(2, 256, 2, 64))
CALLS = {
    "rms_norm": (lambda x, w: ops.rms_norm(x, w), struct(8, 576), weight(576)),
    "layer_norm": (lambda x, w, b: ops.layer_norm(x, w, b), struct(8, 576), weight(576), weight(576)),
    "rotary_embedding": (
        lambda x, c, s: ops.rotary_embedding(x, c, s),
        struct(2, 5, 8, 64),
        struct(5, 32, dtype=jnp.float32),
        struct(5, 32, dtype=jnp.float32),
    ),
    "swiglu": (ops.swiglu, struct(8, 1536), struct(8, 1536)),
    "swiglu packed": (ops.swiglu, struct(8, 3072)),
    "softmax_cross_entropy": (ops.softmax_cross_entropy, struct(8, 1000), struct(8, dtype=jnp.int32)),
    "attention": (lambda q, k, v: ops.attention(q, k, v, causal=True), struct(2, 256, 6, 64), *KV),
    "decode_attention": (ops.decode_attention, struct(2, 6, 64), *KV, struct(2, dtype=jnp.int32)),
    "cache_append": (
        lambda cache, rows, position: ops.cache_append(cache, rows, position),
        struct(256, 2, 64),
        struct(1, 2, 64),
        struct(dtype=jnp.int32),
    ),
    "quantized_linear Q4_1": (
        lambda x, w: ops.quantized_linear(x, w, encoding="Q4_1"),
        struct(1, 576),
        struct(576, 360, dtype=jnp.uint8),
    ),
    "quantized_linear Q8_0": (
        lambda x, w: ops.quantized_linear(x, w, encoding="Q8_0"),
        struct(64, 576),
        struct(576, 612, dtype=jnp.uint8),
    ),
}
by_call = pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
DIFFERENTIABLE = ["rms_norm", "layer_norm", "rotary_embedding", "swiglu", "swiglu packed", "softmax_cross_entropy"]
DIFFERENTIABLE += ["attention"]


def copies(compiled):
    return [thunk for thunk in thunks(compiled) if "copy" in thunk.kind.lower() or "Memcpy" in thunk.kind]


@by_call
def test_captured_without_a_copy(call):
    f, *args = call
    donate = (0,) if f is CALLS["cache_append"][0] else ()
    compiled = xla.compile_deviceless(f, *args, donate_argnums=donate, compiler_options=ONE)
    calls = [thunk for thunk in thunks(compiled) if thunk.kind == "kCustomCall"]
    assert [thunk.buffer is not None for thunk in calls] == [True]
    assert not copies(compiled)


def test_alone_it_is_too_small():
    f, *args = CALLS["rms_norm"]
    assert calls_of(f, *args) == [False]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_are_captured(name):
    f, *args = CALLS[name]
    numbers = tuple(i for i, x in enumerate(args) if x.dtype != jnp.int32)

    def loss(*args):
        return (f(*args).astype(jnp.float32) ** 2).sum()

    assert calls_of(jax.grad(loss, numbers), *args, **ONE) == [True, True]


@by_call
def test_inspect_says_so(call):
    f, *args = call
    report = eqxc.inspect(eqxc.jit_captured(f), *args, platform="cuda")
    (found,) = report.calls
    assert found.lane == "native"
    assert found.target == "eqxcallback_launch_captured"
    assert found.captured is True


def test_float16():
    x = struct(2, 64, 4, 64, dtype=jnp.float16)
    assert calls_of(lambda q: ops.attention(q, q, q), x, **ONE) == [True]
    assert calls_of(lambda x: ops.rms_norm(x), x, **ONE) == [True]


@pytest.mark.parametrize(("op", "size"), [(ops.attention, 257), (ops.decode_attention, 1025)])
def test_heads_that_are_too_large_are_the_references(op, size):
    if op is ops.attention:
        args = struct(2, 8, 4, size), struct(2, 8, 2, size), struct(2, 8, 2, size)
    else:
        args = struct(2, 4, size), struct(2, 8, 2, size), struct(2, 8, 2, size), struct(2, dtype=jnp.int32)
    assert calls_of(op, *args, **ONE) == []
