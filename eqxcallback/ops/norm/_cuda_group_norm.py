"""Group norm. See group_norm.cu."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from ...core import PyTree, ShapeAndDtype
from ...kernel import CudaKernel, Launch
from .._cuda import FOLDER, block_of_rows, ceil, name
from .._supports import floats


def groups_of(x: ShapeAndDtype, groups: int) -> Any:
    """A row for each group of each example."""
    *batch, channels, size = x.shape
    return jax.ShapeDtypeStruct((math.prod(batch) * groups, channels // groups * size), x.dtype)


def _block(x: ShapeAndDtype, groups: int) -> tuple[int, int]:
    return block_of_rows(groups_of(x, groups), packs=4, most=512, least=128)


def blocks_of_groups(x: ShapeAndDtype, groups: int) -> int:
    return ceil(len(groups_of(x, groups)), _block(x, groups)[1])


def of_args(function: Any) -> Any:
    """A function of `x` and the groups, as one of what a forward kernel's functions are called with."""
    return lambda x, *_, groups, **__: function(x, groups)


def of_backward_args(function: Any) -> Any:
    """The same for the functions of a backward kernel."""
    return lambda grads, args, *_, groups, **__: function(args[0], groups)


def _scalars(of: Any) -> dict[str, Any]:
    return {
        "rows": ("int64", of(lambda x, groups: len(groups_of(x, groups)))),
        "groups": "int64",
        "channels": ("int64", of(lambda x, groups: x.shape[-2] // groups)),
        "size": ("int64", of(lambda x, groups: x.shape[-1])),
        "eps": "float32",
    }


def _entry(
    x: ShapeAndDtype, weight: ShapeAndDtype | None = None, bias: ShapeAndDtype | None = None, **_: object
) -> str:
    return name("group_norm", x, weight is not None, bias is not None)


GROUP_NORM = CudaKernel(
    FOLDER / "norm" / "group_norm.cu",
    _entry,
    Launch(grid=of_args(blocks_of_groups), block=of_args(_block)),
    scalars=_scalars(of_args),
    supports=floats,
)


def _backward_entry(grads: PyTree, args: PyTree, *_: object, **__: object) -> str:
    weight = (*args, None)[1]
    return name("group_norm_backward", args[0], weight is not None)


def wanted_sums(grads: PyTree) -> int:
    """Count the gradients of parameters that are needed."""
    return sum(gradient is not None for gradient in grads[1:])


def _workspaces(grads: PyTree, args: PyTree, *_: object, **__: object) -> list[jax.ShapeDtypeStruct]:
    # Without sums it is empty, and still a parameter.
    *batch, channels, _ = args[0].shape
    return [jax.ShapeDtypeStruct((wanted_sums(grads), math.prod(batch), channels), jnp.float32)]


def _sum_entry(grads: PyTree, args: PyTree, *more: object, **options: object) -> str:
    if wanted_sums(grads):
        return name("group_norm_backward_sum", args[0])
    return _backward_entry(grads, args, *more, **options)  # it is not launched, and need not be compiled


def sum_blocks(grads: PyTree, args: PyTree, *_: object, **__: object) -> int:
    return ceil(args[0].shape[-2], 32) if wanted_sums(grads) else 0


GROUP_NORM_BACKWARD = CudaKernel(
    FOLDER / "norm" / "group_norm.cu",
    _backward_entry,
    [
        Launch(grid=of_backward_args(blocks_of_groups), block=of_backward_args(_block)),
        Launch(grid=sum_blocks, block=(32, 8), entry=_sum_entry),
    ],
    scalars=_scalars(of_backward_args),
    workspaces=_workspaces,
    supports=floats,
)
