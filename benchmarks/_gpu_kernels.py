"""Each kernel of ours once, for a profiler or a sanitizer: `python -m benchmarks._gpu_kernels [--large] [NAME ...]`."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .programs import PROGRAMS, Program, struct


_F32, _I32, _U8 = jnp.dtype(jnp.float32), jnp.dtype(jnp.int32), jnp.dtype(jnp.uint8)
_TABLE, _WEIGHT = struct(4096, 64, dtype=_F32), struct(4096, dtype=_F32)
_CACHE, _HEADS = struct(8, 4096, 8, 128), struct(4, 4096, 16, 128)

# As large as what the benchmarks of a GPU measure.
_LARGE = {
    "rms_norm": (struct(16_384, 4096), _WEIGHT),
    "layer_norm": (struct(16_384, 4096), _WEIGHT, _WEIGHT),
    "rotary_embedding": (struct(4, 4096, 32, 128), _TABLE, _TABLE),
    "swiglu": (struct(16_384, 4096), struct(16_384, 4096)),
    "softmax_cross_entropy": (struct(8192, 32_000), struct(8192, dtype=_I32)),
    "attention": (_HEADS, _HEADS, _HEADS),
    "decode_attention": (struct(8, 32, 128), _CACHE, _CACHE, struct(8, dtype=_I32)),
    "quantized_linear Q4_1": (struct(1, 4096), struct(14_336, 2560, dtype=_U8)),
    "quantized_linear Q8_0": (struct(8, 4096), struct(14_336, 4352, dtype=_U8)),
}
# What an integer is, where it is no label: how many keys are seen.
_LENGTHS = {"decode_attention": 4096}


def programs(large: bool, names: Sequence[str] = ()) -> Iterator[tuple[str, Program]]:
    """The forward pass of each, and the gradients of those that have some."""
    for name, program in PROGRAMS.items():
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
    """Random floats; all bits of quantised weights are random, but those of their scales, which are 1."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(_value(rng, name, arg), arg.dtype) for arg in program.args]


def _value(rng: np.random.Generator, name: str, arg: Any) -> Any:
    if arg.dtype == jnp.uint8:
        halves, size = (2, 20) if "Q4_1" in name else (1, 34)
        data = rng.integers(0, 256, (arg.shape[0], arg.shape[1] // size, size), np.uint8)
        data[..., : 2 * halves] = np.ones(halves, np.float16).view(np.uint8)
        return data.reshape(arg.shape)
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
