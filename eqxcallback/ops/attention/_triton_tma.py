"""Attention by the tensor memory accelerator of GPUs since Hopper, where somebody asks for it. See _triton_forward_tma.py."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ...core import ShapeAndDtype, Types
from ...kernel import TritonKernel
from ...transform import architecture
from . import _triton_tiles as tiles
from ._operands import OPTIONAL
from ._triton import ATTENTION


# For which Triton makes machine code with TMA.
ARCHITECTURES = ("sm_90", "sm_100", "sm_103")
# Rows begin at multiples of so many bytes.
_BYTES = 16
# For fewer queries the plain kernel has smaller blocks, or divides their keys.
_LEAST_QUERIES = 65
# Products of f32 have their operands in registers, which do not suffice for more.
_MAX_SIZE_OF_F32 = 96

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

# No GPU has run it yet: who wants to be the first says so. Another kernel makes another program, with another key in caches.
ASKED_FOR = (ATTENTION_TMA,) if os.environ.get("EQXCALLBACK_ATTENTION_TMA", "") not in ("", "0") else ()
