"""The calls that the kernels for GPUs support, and what they say of others."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from eqxcallback.ops.attention import _cuda as decode_cuda, _cuda_decode_backward as decode_backward_cuda, _triton
from eqxcallback.ops.cache import _cuda as cache_cuda
from eqxcallback.ops.glu import _cuda as glu_cuda
from eqxcallback.ops.linear import _cuda as linear_cuda
from eqxcallback.ops.loss import _cuda as loss_cuda
from eqxcallback.ops.norm import (
    _cuda as norm_cuda,
    _cuda_group_norm as group_norm_cuda,
    _cuda_group_norm_parts as group_norm_parts_cuda,
)
from eqxcallback.ops.recurrent import _cuda as recurrent_cuda
from eqxcallback.ops.rotary import _cuda as rotary_cuda


def array(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def said(kernel: Any, arguments: dict[str, Any], **options: Any) -> Any:
    return kernel.supports(collections.namedtuple("Types", arguments)(**arguments), **options)


X, LABELS = array(3, 8), array(3, dtype=jnp.int32)
BF16 = array(3, 8, dtype=jnp.bfloat16)
DECODE = {
    "q": array(2, 8),
    "kv": (array(5, 2, 8), array(5, 2, 8)),
    "length": array(dtype=jnp.int32),
    **dict.fromkeys(("alibi_slopes", "k_scale", "v_scale")),
}
KERNELS: dict[str, tuple[list[Any], dict[str, Any], dict[str, Any]]] = {
    "norm": (
        [norm_cuda.NORM, norm_cuda.NORM_BACKWARD],
        {"x": X, "weight": None, "bias": None},
        {"eps": 1e-5, "center": False},
    ),
    "add_norm": (
        [norm_cuda.ADD_NORM, norm_cuda.ADD_NORM_BACKWARD],
        {"x": X, "residual": X, "weight": None},
        {"eps": 1e-5},
    ),
    "group_norm": (
        [group_norm_cuda.GROUP_NORM, group_norm_cuda.GROUP_NORM_BACKWARD],
        {"x": X, "weight": None, "bias": None},
        {"eps": 1e-5, "groups": 3},
    ),
    "group_norm_parts": (
        [group_norm_parts_cuda.GROUP_NORM, group_norm_parts_cuda.GROUP_NORM_BACKWARD],
        {"x": array(1, 6, 40_000), "weight": None, "bias": None},
        {"eps": 1e-5, "groups": 3},
    ),
    "glu": ([glu_cuda.GLU, glu_cuda.GLU_BACKWARD], {"gate": X, "up": None}, {"activation": "gelu"}),
    "rotary": (
        [rotary_cuda.ROTARY_EMBEDDING, rotary_cuda.ROTARY_EMBEDDING_BACKWARD],
        {"x": array(3, 2, 8), "table": (array(3, 4), array(3, 4))},
        {},
    ),
    "rotary_append": (
        [rotary_cuda.ROTARY_APPEND],
        {
            "qkv": X,
            "table": (array(3, 4), array(3, 4)),
            "k_cache": X,
            "v_cache": X,
            "position": array(dtype=jnp.int32),
        },
        {},
    ),
    "loss": (
        [loss_cuda.CROSS_ENTROPY, loss_cuda.CROSS_ENTROPY_BACKWARD],
        {"logits": X, "labels": LABELS},
        {"label_smoothing": 0.1, "z_loss": 1e-4, "ignore_index": 0},
    ),
    "targets": ([loss_cuda.OF_TARGETS, loss_cuda.OF_TARGETS_BACKWARD], {"logits": X, "targets": X}, {"z_loss": 1e-4}),
    "lstm_gates": (
        [recurrent_cuda.LSTM_GATES, recurrent_cuda.LSTM_GATES_BACKWARD],
        {"gates": X, "cell": X},
        {},
    ),
    "gru_gates": (
        [recurrent_cuda.GRU_GATES, recurrent_cuda.GRU_GATES_BACKWARD],
        {"input_gates": X, "hidden_gates": X, "hidden": X, "bias_n": None},
        {},
    ),
    "linear": (
        [linear_cuda.QUANTIZED_LINEAR, linear_cuda.QUANTIZED_LINEAR_SWIGLU],
        {"x": array(3, 32), "blocks": array(4, 34, dtype=jnp.uint8)},
        {"encoding": "Q8_0", "activations": "exact"},
    ),
    "decode": (
        [decode_cuda.DECODE_ATTENTION, decode_backward_cuda.DECODE_ATTENTION_BACKWARD],
        DECODE,
        {"scale": 1.0, "window": 0, "soft_cap": 0.0},
    ),
    "decode_backward": (
        [decode_backward_cuda.DECODE_ATTENTION_BACKWARD],
        DECODE,
        {"scale": 1.0, "window": 3, "soft_cap": 2.0},
    ),
    "attention": (
        [_triton.ATTENTION, _triton.ATTENTION_BACKWARD],
        {
            "q": array(4, 2, 8),
            "kv": (array(5, 2, 8), array(5, 2, 8)),
            **dict.fromkeys(("bias", "mask", "alibi_slopes", "query_segments", "key_segments")),
            **dict.fromkeys(("lengths", "offset", "dropout_keys", "kept")),
        },
        {"causal": True, "scale": 1.0, "window": 0, "soft_cap": 0.0, "dropout": 0.0},
    ),
}
LACKING = [
    ("add_norm", {"residual": BF16}, {}, "residual has to have the dtype of x, float32; it is bfloat16"),
    (
        "group_norm_parts",
        {"x": array(1, 6, 40)},
        {},
        "groups of 320 bytes are too small, or too many, to be divided among blocks",
    ),
    ("lstm_gates", {"cell": BF16}, {}, "cell has to have the dtype of gates, float32; it is bfloat16"),
    ("gru_gates", {"hidden": BF16}, {}, "hidden has to have the dtype of input_gates, float32; it is bfloat16"),
    ("glu", {}, {"activation": "relu"}, "it has no activation 'relu'"),
    ("linear", {}, {"activations": "int8"}, "it has no int8 activations"),
    (
        "linear",
        {},
        {"encoding": "Q4_1_R16"},
        "it has the encodings Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K; this is Q4_1_R16",
    ),
    (
        "linear",
        {"x": array(9, 32)},
        {},
        "x can have at most 8 rows, as XLA is faster at products of matrices; it has 9",
    ),
    ("decode", {"q": array(2, 1025)}, {}, "heads have to be no longer than 1024; they are 1025"),
    (
        "decode",
        {"q": array(2, 513)},
        {"soft_cap": 30.0},
        "heads have to be no longer than 512 with a cache in int8, ALiBi slopes or a soft cap; they are 513",
    ),
    (
        "decode",
        {"k_scale": array(3, 5, 2), "v_scale": array(3, 5, 2)},
        {},
        "scales have to have the batch axes of the cache, (5, 2); they are (3, 5, 2)",
    ),
    (
        "decode",
        {"q": array(2, 3, 4, 2, 8), "alibi_slopes": array(2, 1, 4, 2)},
        {},
        "alibi_slopes have a batch axis of 1 between others: they are float32[2,1,4,2]",
    ),
    (
        "decode_backward",
        {"q": array(18, 8)},
        {},
        "no more than 8 heads of q may share those of the cache; 9 do",
    ),
    (
        "decode_backward",
        {"q": array(10, 257)},
        {},
        "no more than 4 heads of q longer than 256 may share those of the cache; 5 do",
    ),
    ("attention", {"q": array(4, 2, 257)}, {}, "heads have to be no longer than 256; they are 257"),
    (
        "attention",
        {"q": array(2, 3, 4, 4, 2, 8), "mask": array(2, 1, 4, 1, 4, 5, dtype=jnp.bool)},
        {},
        "mask has a batch axis of 1 between others: it is bool[2,1,4,1,4,5]",
    ),
]


@pytest.mark.parametrize("name", KERNELS)
def test_dtypes(name):
    kernels, arguments, options = KERNELS[name]
    first, x = next(iter(arguments.items()))
    for kernel in kernels:
        for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
            assert said(kernel, _of_dtype(arguments, x, dtype), **options) is True
        for dtype in (jnp.int32, jnp.float8_e5m2):
            reason = f"{first} has to be float32, bfloat16 or float16; it is {jnp.dtype(dtype)}"
            assert said(kernel, _of_dtype(arguments, x, dtype), **options) == reason


def _of_dtype(arguments: dict[str, Any], x: Any, dtype: Any) -> dict[str, Any]:
    """Every argument that is `x` has another dtype."""
    return {name: array(*x.shape, dtype=dtype) if value is x else value for name, value in arguments.items()}


@pytest.mark.parametrize(("name", "arguments", "options", "reason"), LACKING, ids=str)
def test_what_is_lacking(name, arguments, options, reason):
    kernels, supported, defaults = KERNELS[name]
    for kernel in kernels:
        assert said(kernel, {**supported, **arguments}, **{**defaults, **options}) == reason


def test_elements_of_a_cache():
    def of(dtype):
        cache = array(4, 3, dtype=dtype)
        arguments = {"cache": cache, "rows": cache, "position": array(dtype=jnp.int32)}
        return said(cache_cuda.CACHE_APPEND, arguments, row_rank=1)

    for dtype in (jnp.float32, jnp.int8, jnp.bool, jnp.complex64, jnp.float8_e5m2):
        assert of(dtype) is True
    assert of(jnp.int4) == "elements of cache have to be whole bytes; they are int4"
    assert of(jax.random.key(0).dtype) == "cache has to be an array of numbers; it is key<fry>"
