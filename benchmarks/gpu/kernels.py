"""Each kernel of ours once, for a profiler or a sanitizer: `python -m benchmarks.gpu.kernels [--large] [NAME ...]`."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eqxcallback import ops

from .._contestants import random_blocks
from ..programs import ASKED_FOR, PROGRAMS, Program, struct


_TABLE, _WEIGHT = struct(4096, 64, dtype=jnp.float32), struct(4096, dtype=jnp.float32)
_CACHE, _HEADS = struct(8, 4096, 8, 128), struct(4, 4096, 16, 128)

# As large as what the benchmarks of a GPU measure.
_LARGE = {
    "rms_norm": (struct(16_384, 4096), _WEIGHT),
    "layer_norm": (struct(16_384, 4096), _WEIGHT, _WEIGHT),
    "add_rms_norm": (struct(16_384, 4096), struct(16_384, 4096), _WEIGHT),
    "group_norm": (struct(128, 512, 256), *2 * [struct(512, dtype=jnp.float32)]),
    "group_norm in parts": (struct(1, 128, 262_144), *2 * [struct(128, dtype=jnp.float32)]),
    "rotary_embedding": (struct(4, 4096, 32, 128), _TABLE, _TABLE),
    "swiglu": (struct(16_384, 4096), struct(16_384, 4096)),
    "softmax": (struct(16_384, 4096), struct(4096, dtype=jnp.bool_)),
    "softmax_cross_entropy": (struct(8192, 32_000), struct(8192, dtype=jnp.int32)),
    "lstm_gates": (struct(4096, 8192), struct(4096, 2048)),
    "gru_gates": (struct(4096, 6144), struct(4096, 6144), struct(4096, 2048), struct(2048, dtype=jnp.float32)),
    "attention": (_HEADS, _HEADS, _HEADS),
    "attention of few queries": (struct(8, 8, 32, 128), _CACHE, _CACHE),
    "decode_attention": (struct(8, 32, 128), _CACHE, _CACHE, struct(8, dtype=jnp.int32)),
    "decode_attention by tensor cores": (struct(8, 32, 128), _CACHE, _CACHE, struct(8, dtype=jnp.int32)),
    "quantized_linear Q4_1": (struct(1, 4096), struct(14_336, 2560, dtype=jnp.uint8)),
    "quantized_linear Q8_0": (struct(8, 4096), struct(14_336, 4352, dtype=jnp.uint8)),
    "quantized_linear_swiglu Q4_1": (struct(1, 4096), struct(28_672, 2560, dtype=jnp.uint8)),
    "quantized_linear Q4_K": (struct(1, 4096), struct(14_336, 2304, dtype=jnp.uint8)),
    "quantized_linear Q6_K": (struct(1, 4096), struct(14_336, 3360, dtype=jnp.uint8)),
    "quantized_linear by tensor cores Q4_1": (struct(8, 4096), struct(14_336, 2560, dtype=jnp.uint8)),
    "attention in any order": (_HEADS, _HEADS, _HEADS),
    "attention with bias": (_HEADS, _HEADS, _HEADS, struct(16, 4096, 4096)),
    "attention with slopes": (_HEADS, _HEADS, _HEADS, struct(16, dtype=jnp.float32)),
    "cache_append": (struct(32_768, 8, 128), struct(4096, 8, 128), struct(dtype=jnp.int32)),
    "rotary_append": (struct(4096, 48, 128), _TABLE, _TABLE, *2 * [struct(32_768, 8, 128)], struct(dtype=jnp.int32)),
}
# Integers that are numbers of keys. The others are labels and positions.
_LENGTHS = {"decode_attention": 4096, "decode_attention by tensor cores": 4096}


def programs(large: bool, names: Sequence[str] = ()) -> Iterator[tuple[str, Program]]:
    """The forward pass of each, and the gradients of those that have some."""
    for name, program in {**PROGRAMS, **ASKED_FOR}.items():
        if names and name not in names:
            continue
        if large:
            if name not in _LARGE:
                continue
            program = program._replace(args=_LARGE[name])
        yield name, program
        if program.differentiable:
            yield f"{name}, gradients", program.gradients


def values(name: str, program: Program) -> list[jax.Array]:
    """Random numbers, and integers that are in range."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(_value(rng, name, arg), arg.dtype) for arg in program.args]


def _value(rng: np.random.Generator, name: str, arg: Any) -> Any:
    if arg.dtype == jnp.uint8:
        encoding: Any = name.split()[-1]
        return random_blocks(rng, encoding, arg.shape[0], arg.shape[1] // ops.ENCODINGS[encoding])
    if jnp.issubdtype(arg.dtype, jnp.integer):
        return np.full(arg.shape, _LENGTHS.get(name, 5))
    return rng.standard_normal(arg.shape, np.float32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="these alone")
    parser.add_argument("--large", action="store_true", help="sizes that fill a GPU")
    options = parser.parse_args()
    count = 0
    for name, program in programs(options.large, options.names):
        jax.block_until_ready(jax.jit(program.function)(*values(name.split(",")[0], program)))
        count += 1
        print(name, flush=True)
    print(f"{count} programs ran on {jax.devices()[0].device_kind}", flush=True)
    return 0 if count else 1


if __name__ == "__main__":
    sys.exit(main())
