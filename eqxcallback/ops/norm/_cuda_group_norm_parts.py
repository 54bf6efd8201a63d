"""Group norm of large groups, each of which several blocks share. See group_norm_parts.cu."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from ...core import PyTree, ShapeAndDtype, Types
from ...kernel import CudaKernel, Launch
from .._cuda import FOLDER, ceil, multiprocessors, name, pack
from .._supports import floats
from ._cuda_group_norm import blocks_of_groups, groups_of, of_args, of_backward_args, sum_blocks, wanted_sums


_SOURCE = FOLDER / "norm" / "group_norm_parts.cu"
# Each thread of a block keeps 64 bytes in registers, and a multiprocessor runs so many blocks.
_THREADS, _PART_BYTES, _RESIDENT_BLOCKS = 256, 256 * 64, 3
# Each block reads the moments of all parts of its group.
_MOST_PARTS = 512
# A block that has a group for itself reads it three times, and two of those share the cache of a multiprocessor.
_CACHED_BYTES, _RESIDENT_GROUPS = 128 << 10, 2


def _bytes(x: ShapeAndDtype, groups: int) -> int:
    """Return the bytes of a group."""
    return groups_of(x, groups).shape[-1] * x.dtype.itemsize


def _is_divided(x: ShapeAndDtype, groups: int) -> bool:
    """True if one launch more costs less than groups that do not stay in a cache, or multiprocessors with nothing to do."""
    blocks = blocks_of_groups(x, groups)
    has_few = blocks < _RESIDENT_GROUPS * multiprocessors()
    return blocks > 0 and _bytes(x, groups) >= (4 * _PART_BYTES if has_few else _CACHED_BYTES)


def _division(x: ShapeAndDtype, groups: int) -> tuple[int, int]:
    """The channels of a part, and how many elements of each: all, or those of a piece."""
    rows, channels, size = len(groups_of(x, groups)), x.shape[-2] // groups, x.shape[-1]
    # As many as fit into registers. More of them, with a fourth of that at least, where these leave multiprocessors idle.
    fitting, smallest = ceil(_bytes(x, groups), _PART_BYTES), 4 * _bytes(x, groups) // _PART_BYTES
    wanted = min(max(fitting, min(_RESIDENT_BLOCKS * multiprocessors() // rows, smallest)), _MOST_PARTS)
    if wanted <= channels:
        return channels // wanted, size
    return 1, min(size, pack(x) * ceil(size, pack(x) * ceil(wanted, channels)))


def _pieces(x: ShapeAndDtype, groups: int) -> int:
    return ceil(x.shape[-1], _division(x, groups)[1])


def _parts(x: ShapeAndDtype, groups: int) -> int:
    return ceil(x.shape[-2] // groups, _division(x, groups)[0]) * _pieces(x, groups)


def _blocks(x: ShapeAndDtype, groups: int) -> int:
    return len(groups_of(x, groups)) * _parts(x, groups)


def _moments(x: ShapeAndDtype, groups: int, numbers: int = 4) -> jax.ShapeDtypeStruct:
    """Return the type of an array with so many `numbers` of each part."""
    return jax.ShapeDtypeStruct((_blocks(x, groups), numbers), jnp.float32)


def _scalars(of: Any) -> dict[str, Any]:
    return {
        "groups": "int64",
        "channels": ("int64", of(lambda x, groups: x.shape[-2] // groups)),
        "size": ("int64", of(lambda x, groups: x.shape[-1])),
        "parts": ("int64", of(_parts)),
        "part_channels": ("int64", of(lambda x, groups: _division(x, groups)[0])),
        "piece": ("int64", of(lambda x, groups: _division(x, groups)[1])),
        "eps": "float32",
    }


def _supports(types: Types, **options: Any) -> bool | str:
    known = floats(types, **options)
    if known is not True or _is_divided(types.x, options["groups"]):
        return known
    return (
        f"groups of {_bytes(types.x, options['groups']):,} bytes are too small, or too many, to be divided among blocks"
    )


def _entry(
    x: ShapeAndDtype, weight: ShapeAndDtype | None = None, bias: ShapeAndDtype | None = None, **_: object
) -> str:
    return name("group_norm_of_parts", x, weight is not None, bias is not None)


GROUP_NORM = CudaKernel(
    _SOURCE,
    _entry,
    [
        Launch(grid=of_args(_blocks), block=_THREADS, entry=lambda x, *_, **__: name("group_norm_moments", x)),
        Launch(grid=of_args(_blocks), block=_THREADS),
    ],
    scalars=_scalars(of_args),
    workspaces=lambda x, *_, groups, **__: [_moments(x, groups)],
    supports=_supports,
)


def _backward_entry(kernel: str, has_weight: bool = True) -> Any:
    def entry(grads: PyTree, args: PyTree, *_: object, **__: object) -> str:
        weight = (*args, None)[1]
        return name(f"group_norm_backward_{kernel}", args[0], *([weight is not None] if has_weight else []))

    return entry


def _backward_blocks(grads: PyTree, args: PyTree, *_: object, groups: int, **__: object) -> int:
    return _blocks(args[0], groups) if grads[0] is not None else 0


def _backward_workspaces(
    grads: PyTree, args: PyTree, *_: object, groups: int, **__: object
) -> list[jax.ShapeDtypeStruct]:
    x = args[0]
    *batch, channels, _ = x.shape
    sums = wanted_sums(grads), math.prod(batch), _pieces(x, groups), channels
    return [_moments(x, groups), _moments(x, groups, 2), jax.ShapeDtypeStruct(sums, jnp.float32)]


GROUP_NORM_BACKWARD = CudaKernel(
    _SOURCE,
    _backward_entry("moments", has_weight=False),
    [
        Launch(grid=of_backward_args(_blocks), block=_THREADS),
        Launch(grid=of_backward_args(_blocks), block=_THREADS, entry=_backward_entry("sums")),
        Launch(grid=_backward_blocks, block=_THREADS, entry=_backward_entry("of_parts")),
        Launch(grid=sum_blocks, block=(32, 8), entry=_backward_entry("parts_sum", has_weight=False)),
    ],
    scalars={
        "batch": ("int64", of_backward_args(lambda x, groups: math.prod(x.shape[:-2]))),
        **_scalars(of_backward_args),
    },
    workspaces=_backward_workspaces,
    supports=_supports,
)
