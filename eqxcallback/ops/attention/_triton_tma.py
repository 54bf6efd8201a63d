"""Attention by the tensor memory accelerator of GPUs since Hopper, where somebody asks for it.

See _triton_forward_tma.py and _triton_backward_tma.py.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...core import PyTree, ShapeAndDtype, Types
from ...kernel import TritonKernel
from ...transform import architecture
from .._cuda import ceil
from . import _triton_tiles as tiles
from ._operands import OPTIONAL
from ._triton import ATTENTION, ATTENTION_BACKWARD, keys_grid, queries_grid


# For which Triton makes machine code with TMA.
ARCHITECTURES = ("sm_90", "sm_100", "sm_103")
# Rows begin at multiples of so many bytes.
_BYTES = 16
# For fewer queries the plain kernel has smaller blocks, or divides their keys.
_LEAST_QUERIES = 65
# Products of f32 have their operands in registers, which do not suffice for more.
_MAX_SIZE_OF_F32 = 96
# Longer ones would have two sums of 64 keys in more registers than there are.
_MAX_SIZE_OF_GRADIENTS = 128
# At such a multiple of numbers in f32 the statistics of a head begin.
_ALIGNED = _BYTES // 4

_SCALARS = ("queries", "keys", "heads", "kv_heads", "kv_batch", "scale")


def _supports(types: Types, **options: object) -> bool | str:
    q, kv, *optional = types
    arch = architecture(None)
    if arch.rstrip("af") not in ARCHITECTURES:
        return f"the architecture has to be one of {', '.join(ARCHITECTURES)}; it is {arch}"
    asked = [name for name in ("window", "soft_cap", "dropout") if options[name]]
    asked += [name for name, x in zip(OPTIONAL, optional, strict=True) if x is not None]
    if asked:
        return f"it has no {asked[0]}"
    if options["scale"] == 0:
        return "scale has to be another number than 0"
    size, bits = q.shape[-1], 8 * q.dtype.itemsize
    if size * bits % (8 * _BYTES):
        return f"heads have to be a multiple of {_BYTES} bytes long; they are {size} numbers of {bits} bits"
    if bits == 32 and size > _MAX_SIZE_OF_F32:
        return f"heads have to be no longer than {_MAX_SIZE_OF_F32} in f32; they are {size}"
    if q.shape[-3] < _LEAST_QUERIES:
        return f"there have to be {_LEAST_QUERIES} queries or more; there are {q.shape[-3]}"
    if 0 in q.shape or 0 in kv[0].shape:
        return f"no array may be empty; q has the shape {q.shape}, and k {kv[0].shape}"
    return ATTENTION.supports(types, **options)


def _choose(
    arch: int, q: ShapeAndDtype, kv: Sequence[ShapeAndDtype], *_: object, causal: bool, scale: float, **__: object
) -> Mapping[str, Any]:
    choice = tiles.choose_tma(arch, q.shape[-1], q.dtype.name)
    return {
        **choice.constants,
        "num_warps": choice.num_warps,
        "num_stages": choice.num_stages,
        "CAUSAL": causal,
        "NEGATIVE": scale < 0,
        "MASKED": causal or kv[0].shape[-3] % choice.constants["BLOCK_KEYS"] != 0,
    }


ATTENTION_TMA = TritonKernel(
    "eqxcallback.ops.attention._triton_forward_tma:attention_forward_tma",
    ATTENTION.grid,
    scalars={name: ATTENTION.scalars[name] for name in _SCALARS},
    choose=_choose,
    supports=_supports,
)


def _supports_gradients(types: Types, **options: object) -> bool | str:
    if (reason := _supports(types, **options)) is not True:
        return reason
    q, arch = types[0], architecture(None)
    if q.dtype.itemsize != 2:
        return f"q has to be bfloat16 or float16; it is {q.dtype}"
    if q.shape[-1] > _MAX_SIZE_OF_GRADIENTS:
        return f"heads have to be no longer than {_MAX_SIZE_OF_GRADIENTS}; they are {q.shape[-1]}"
    if not arch.startswith("sm_90") and tiles.split(q.shape[-1])[1]:
        # Triton 3.6 wants more tensor memory than there is, or ends in an error.
        return f"on {arch} heads have to be one tile; those of {q.shape[-1]} are two"
    return True


def _statistics(grads: PyTree, args: PyTree, *_: object, **__: object) -> list[jax.ShapeDtypeStruct]:
    """The workspaces of `ATTENTION_BACKWARD`, of which the first two have longer rows."""
    *batch, queries, heads, _ = args[0].shape
    of_rows = jax.ShapeDtypeStruct((math.prod(batch), heads, ceil(queries, _ALIGNED) * _ALIGNED), jnp.float32)
    return [of_rows, of_rows, *[jax.ShapeDtypeStruct((1,), jnp.float32)] * 2]


def _step(name: str, grid: Callable[..., int], choose_tile: Callable[..., tiles.Choice]) -> TritonKernel:
    """One of the launches of the backward pass after that of rows."""

    def settings(arch: int, grads: PyTree, args: PyTree, *_: object, causal: bool, **__: object) -> Mapping[str, Any]:
        q, kv = args[:2]
        choice = choose_tile(arch, q.shape[-1], q.dtype.name)
        constants: dict[str, Any] = {**choice.constants, "CAUSAL": causal, "ALIGNED": _ALIGNED}
        if name == "queries":
            constants["MASKED"] = causal or kv[0].shape[-3] % choice.constants["BLOCK_KEYS"] != 0
        return {**constants, "num_warps": choice.num_warps, "num_stages": choice.num_stages}

    module = "eqxcallback.ops.attention._triton_backward_tma"
    return TritonKernel(f"{module}:attention_backward_{name}_tma", grid, choose=settings)


ATTENTION_BACKWARD_TMA = dataclasses.replace(
    ATTENTION_BACKWARD,
    constexprs={**ATTENTION_BACKWARD.constexprs, "ALIGNED": _ALIGNED},
    workspaces=_statistics,
    then=[
        _step("keys", keys_grid, tiles.choose_keys_tma),
        _step("queries", queries_grid, tiles.choose_queries_tma),
    ],
    supports=_supports_gradients,
)

# No GPU has run them yet: who wants to be the first says so. Another kernel makes another program, with another key in caches.
_IS_ASKED = os.environ.get("EQXCALLBACK_ATTENTION_TMA", "") not in ("", "0")
ASKED_FOR = (ATTENTION_TMA,) if _IS_ASKED else ()
GRADIENTS_ASKED_FOR = (ATTENTION_BACKWARD_TMA,) if _IS_ASKED else ()
