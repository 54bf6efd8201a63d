"""Each kernel of ours once, for a profiler or a sanitizer: `python -m benchmarks.gpu.kernels [--large] [NAME ...]`."""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eqxcallback import ops
from eqxcallback.ops.linear._cuda import QUANTIZED_LINEAR_IF_CHOSEN

from .._contestants import random_blocks
from ..programs import (
    BY_TENSOR_CORES,
    PROGRAMS,
    Program,
    decode_by_tensor_cores,
    decode_by_the_plain_kernel,
    quantized_linear_by,
    quantized_linear_by_tensor_cores,
    struct,
)


def _geglu_by_erf(gate: Any, up: Any) -> jax.Array:
    return ops.geglu(gate, up, approximate=False)


def _masked(q: Any, k: Any, v: Any, mask: Any) -> jax.Array:
    return ops.attention(q, k, v, mask=mask, dropout=0.1, key=jax.random.split(jax.random.key(0), q.shape[0]))


def _biased(q: Any, k: Any, v: Any, bias: Any, slopes: Any) -> jax.Array:
    return ops.attention(q, k, v, causal=True, window=200, soft_cap=30.0, bias=bias, alibi_slopes=slopes)


def _decode_int8(q: Any, k: Any, v: Any, length: Any, k_scale: Any, v_scale: Any) -> jax.Array:
    return decode_by_the_plain_kernel(q, k, v, length, None, k_scale, v_scale)


def _decode_with_slopes(q: Any, k: Any, v: Any, length: Any, slopes: Any) -> jax.Array:
    return decode_by_the_plain_kernel(q, k, v, length, slopes, window=200, soft_cap=30.0)


_QUERIES, *_KEYS = PROGRAMS["attention"].args
_CACHES = struct(2, 6, 64), *2 * [struct(2, 256, 2, 64, dtype=jnp.int8)], PROGRAMS["decode_attention"].args[-1]
_SCALES = 2 * [struct(2, 256, 2, dtype=jnp.float32)]
# The kernels that the programs of single ops leave out: those of options, and those that do not run by themselves.
MORE = {
    "geglu by tanh": PROGRAMS["swiglu"]._replace(function=ops.geglu),
    "geglu by erf": PROGRAMS["swiglu"]._replace(function=_geglu_by_erf),
    "attention with a mask and dropout": Program(
        _masked, (_QUERIES, *_KEYS, struct(2, 1, 256, 256, dtype=jnp.bool_)), differentiable=(0, 1, 2)
    ),
    "attention with a bias and slopes": Program(
        _biased,
        (_QUERIES, *_KEYS, struct(1, 1, 256, 256), struct(6, dtype=jnp.float32)),
        differentiable=(0, 1, 2, 3, 4),
    ),
    "decode_attention of int8": Program(_decode_int8, (*_CACHES, *_SCALES), differentiable=(0, 4, 5)),
    "decode_attention with slopes": Program(
        _decode_with_slopes,
        (*PROGRAMS["decode_attention"].args, struct(6, dtype=jnp.float32)),
        differentiable=(0, 1, 2, 4),
    ),
    "decode_attention of int8 by tensor cores": Program(decode_by_tensor_cores, (*_CACHES, *_SCALES)),
    "quantized_linear of many rows Q4_1": Program(
        quantized_linear_by(QUANTIZED_LINEAR_IF_CHOSEN, "Q4_1"),
        (struct(65, 576), PROGRAMS["quantized_linear Q4_1"].args[1]),
    ),
    "quantized_linear by tensor cores Q8_0": Program(
        quantized_linear_by_tensor_cores("Q8_0"), (struct(33, 512), struct(576, 544, dtype=jnp.uint8))
    ),
}
EVERY = {**PROGRAMS, **BY_TENSOR_CORES, **MORE}

_TABLE, _WEIGHT = struct(4096, 64, dtype=jnp.float32), struct(4096, dtype=jnp.float32)
_CACHE, _HEADS = struct(8, 4096, 8, 128), struct(4, 4096, 16, 128)
_QUERY, _LENGTHS = struct(8, 32, 128), struct(8, dtype=jnp.int32)
_INT8 = *2 * [struct(*_CACHE.shape, dtype=jnp.int8)], _LENGTHS, *2 * [struct(*_CACHE.shape[:-1], dtype=jnp.float32)]

# As large as what the benchmarks of a GPU measure.
_LARGE = {
    "rms_norm": (struct(16_384, 4096), _WEIGHT),
    "layer_norm": (struct(16_384, 4096), _WEIGHT, _WEIGHT),
    "add_rms_norm": (struct(16_384, 4096), struct(16_384, 4096), _WEIGHT),
    "group_norm": (struct(128, 512, 256), *2 * [struct(512, dtype=jnp.float32)]),
    "group_norm in parts": (struct(1, 128, 262_144), *2 * [struct(128, dtype=jnp.float32)]),
    "rotary_embedding": (struct(4, 4096, 32, 128), _TABLE, _TABLE),
    "swiglu": (struct(16_384, 4096), struct(16_384, 4096)),
    "geglu by tanh": (struct(16_384, 4096), struct(16_384, 4096)),
    "geglu by erf": (struct(16_384, 4096), struct(16_384, 4096)),
    "softmax": (struct(16_384, 4096), struct(4096, dtype=jnp.bool_)),
    "softmax_cross_entropy": (struct(8192, 32_000), struct(8192, dtype=jnp.int32)),
    "lstm_gates": (struct(4096, 8192), struct(4096, 2048)),
    "gru_gates": (struct(4096, 6144), struct(4096, 6144), struct(4096, 2048), struct(2048, dtype=jnp.float32)),
    "attention": (_HEADS, _HEADS, _HEADS),
    "attention of few queries": (struct(8, 8, 32, 128), _CACHE, _CACHE),
    "attention with a mask and dropout": (_HEADS, _HEADS, _HEADS, struct(4, 1, 4096, 4096, dtype=jnp.bool_)),
    "attention with a bias and slopes": (
        *3 * [_HEADS],
        struct(1, 1, 4096, 4096),
        struct(16, dtype=jnp.float32),
    ),
    "decode_attention": (_QUERY, _CACHE, _CACHE, _LENGTHS),
    "decode_attention by tensor cores": (_QUERY, _CACHE, _CACHE, _LENGTHS),
    "decode_attention of int8": (_QUERY, *_INT8),
    "decode_attention with slopes": (_QUERY, _CACHE, _CACHE, _LENGTHS, struct(32, dtype=jnp.float32)),
    "decode_attention of int8 by tensor cores": (_QUERY, *_INT8),
    "quantized_linear Q4_1": (struct(1, 4096), struct(14_336, 2560, dtype=jnp.uint8)),
    "quantized_linear Q8_0": (struct(1, 4096), struct(14_336, 4352, dtype=jnp.uint8)),
    "quantized_linear_swiglu Q4_1": (struct(1, 4096), struct(28_672, 2560, dtype=jnp.uint8)),
    "quantized_linear by tensor cores Q4_1": (struct(8, 4096), struct(14_336, 2560, dtype=jnp.uint8)),
    "quantized_linear by tensor cores Q8_0": (struct(64, 4096), struct(14_336, 4352, dtype=jnp.uint8)),
    "quantized_linear of many rows Q4_1": (struct(2048, 4096), struct(14_336, 2560, dtype=jnp.uint8)),
    "swiglu packed": (struct(16_384, 8192),),
    "softmax_cross_entropy targets": (struct(2048, 32_000), struct(2048, 32_000)),
    "quantized_linear Q4_K": (struct(1, 4096), struct(14_336, 2304, dtype=jnp.uint8)),
    "quantized_linear Q6_K": (struct(1, 4096), struct(14_336, 3360, dtype=jnp.uint8)),
    "attention with bias": (_HEADS, _HEADS, _HEADS, struct(16, 4096, 4096)),
    "attention with slopes": (_HEADS, _HEADS, _HEADS, struct(16, dtype=jnp.float32)),
    "cache_append": (struct(32_768, 8, 128), struct(4096, 8, 128), struct(dtype=jnp.int32)),
    "rotary_append": (struct(4096, 48, 128), _TABLE, _TABLE, *2 * [struct(32_768, 8, 128)], struct(dtype=jnp.int32)),
}


def programs(large: bool, names: Sequence[str] = ()) -> Iterator[tuple[str, Program]]:
    """The forward pass of each, and the gradients of those that have some."""
    for name, program in EVERY.items():
        if names and name not in names:
            continue
        if large:
            program = program._replace(args=_LARGE[name])
        yield name, program
        if program.differentiable:
            yield f"{name}, gradients", program.gradients


def values(name: str, program: Program) -> list[jax.Array]:
    """Random numbers, and integers that are in range."""
    rng = np.random.default_rng(0)
    # Integers are numbers of keys, or labels and positions.
    integer = program.args[1].shape[-3] if name.startswith("decode_attention") else 5
    return [jnp.asarray(_value(rng, name, arg, integer), arg.dtype) for arg in program.args]


def _value(rng: np.random.Generator, name: str, arg: Any, integer: int) -> Any:
    if arg.dtype == jnp.uint8:
        encoding: Any = name.split()[-1]
        return random_blocks(rng, encoding, arg.shape[0], arg.shape[1] // ops.ENCODINGS[encoding])
    if arg.dtype == jnp.int8:
        return rng.integers(-128, 128, arg.shape, np.int8)
    if arg.dtype == jnp.bool_:
        return rng.random(arg.shape, np.float32) < 0.9
    if jnp.issubdtype(arg.dtype, jnp.integer):
        return np.full(arg.shape, integer)
    return rng.standard_normal(arg.shape, np.float32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="these alone")
    parser.add_argument("--large", action="store_true", help="sizes that fill a GPU")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no other program begins")
    options = parser.parse_args()
    ends = time.monotonic() + options.seconds
    every, count = list(programs(options.large, options.names)), 0
    for name, program in every:
        if time.monotonic() > ends:
            break
        jax.block_until_ready(jax.jit(program.function)(*values(name.split(",")[0], program)))
        count += 1
        print(name, flush=True)
    print(f"{count} of {len(every)} programs ran on {jax.devices()[0].device_kind}", flush=True)
    return 0 if count else 1


if __name__ == "__main__":
    sys.exit(main())
