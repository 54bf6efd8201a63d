"""RMS norm, layer norm, and RMS norm of a sum. See norm.cu."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from ...core import PyTree, ShapeAndDtype
from ...kernel import CudaKernel, Launch
from ...transform import architecture, most_shared_bytes
from .._cuda import FOLDER, block_of_rows, ceil, multiprocessors, name, of_first
from .._supports import floats, floats_alike


# The dynamic shared memory in which a block sums the gradients of parameters, if they fit. Some devices have less.
_SHARED_BYTES = 96 << 10
_ALIKE = floats_alike("residual")


def _rows(x: ShapeAndDtype) -> int:
    return math.prod(x.shape[:-1])


def _block(x: ShapeAndDtype) -> tuple[int, int]:
    return block_of_rows(x, packs=4, most=512, least=128)


def _reads_ahead(x: ShapeAndDtype, weight: ShapeAndDtype | None) -> bool:
    """True if the weight is read before the sums are there: where a multiprocessor has a row at most."""
    return weight is not None and _rows(x) <= multiprocessors()


def _entry(
    x: ShapeAndDtype,
    weight: ShapeAndDtype | None = None,
    bias: ShapeAndDtype | None = None,
    *,
    center: bool,
    **_: object,
) -> str:
    return name("normalize", x, center, weight is not None, bias is not None, _reads_ahead(x, weight))


def _add_entry(x: ShapeAndDtype, residual: ShapeAndDtype, weight: ShapeAndDtype | None = None, **_: object) -> str:
    return name("add_normalize", x, weight is not None, _reads_ahead(x, weight))


def _forward(entry: Any, supports: Any) -> CudaKernel:
    return CudaKernel(
        FOLDER / "norm" / "norm.cu",
        entry,
        Launch(grid=lambda x, *_, **__: ceil(_rows(x), _block(x)[1]), block=lambda x, *_, **__: _block(x)),
        scalars={
            "rows": ("int64", lambda x, *_, **__: _rows(x)),
            "size": ("int64", lambda x, *_, **__: x.shape[-1]),
            "eps": "float32",
        },
        supports=supports,
    )


NORM, ADD_NORM = _forward(_entry, floats), _forward(_add_entry, _ALIKE)


def _backward_block(x: ShapeAndDtype) -> tuple[int, int]:
    return block_of_rows(x, packs=2, most=512, least=256)


def _parts(x: ShapeAndDtype) -> int:
    """The blocks of the backward kernel: those that run at a time, each of which sums over its rows."""
    threads, rows = _backward_block(x)
    return max(1, min(ceil(_rows(x), rows), multiprocessors() * max(1, 768 // (threads * rows))))


def _wanted_sums(grads: PyTree) -> tuple[bool, bool]:
    """Tell whether the gradients of weight and bias are needed, which are sums over rows."""
    _, dweight, dbias = (*grads, None, None)[:3]
    return dweight is not None, dbias is not None


def _backward_entry(grads: PyTree, args: PyTree, *_: object, center: bool, **__: object) -> str:
    weight = (*args, None)[1]
    return name("normalize_backward", args[0], center, weight is not None, *_wanted_sums(grads))


def _wanted_sum_of_add(grads: PyTree) -> tuple[bool]:
    _, _, dweight = (*grads, None)[:3]
    return (dweight is not None,)


def _add_backward_entry(grads: PyTree, args: PyTree, *_: object, **__: object) -> str:
    weight = (*args, None)[2]
    return name("add_normalize_backward", args[0], weight is not None, *_wanted_sum_of_add(grads))


def _backward(entry: Any, of_sums: str, wanted_sums: Any, supports: Any) -> CudaKernel:
    """`of_sums`: the second launch, which adds up what the blocks have. `wanted_sums` says of `grads` which there are."""

    def sum_entry(grads: PyTree, args: PyTree, *more: object, **options: object) -> str:
        if any(wanted_sums(grads)):
            return name(of_sums, args[0])
        return entry(grads, args, *more, **options)  # it is not launched, and need not be compiled

    def shared_bytes(grads: PyTree, args: PyTree, *_: object, **__: object) -> int:
        wanted = _backward_block(args[0])[1] * sum(wanted_sums(grads)) * args[0].shape[-1] * 4
        return wanted if wanted <= min(_SHARED_BYTES, most_shared_bytes(architecture(None))) else 0

    def workspaces(grads: PyTree, args: PyTree, *_: object, **__: object) -> list[jax.ShapeDtypeStruct]:
        # Without sums it is empty, and still a parameter.
        shape = _parts(args[0]), sum(wanted_sums(grads)), args[0].shape[-1]
        return [jax.ShapeDtypeStruct(shape, jnp.float32)]

    def sum_blocks(grads: PyTree, args: PyTree, *_: object, **__: object) -> int:
        return ceil(args[0].shape[-1], 32) if any(wanted_sums(grads)) else 0

    return CudaKernel(
        FOLDER / "norm" / "norm.cu",
        entry,
        [
            Launch(grid=of_first(_parts), block=of_first(_backward_block), shared_bytes=shared_bytes),
            Launch(grid=sum_blocks, block=(32, 8), entry=sum_entry),
        ],
        scalars={
            "rows": ("int64", of_first(_rows)),
            "size": ("int64", of_first(lambda x: x.shape[-1])),
            "parts": ("int64", of_first(_parts)),
            "shared_bytes": ("int64", shared_bytes),
            "eps": "float32",
        },
        workspaces=workspaces,
        supports=supports,
    )


NORM_BACKWARD = _backward(_backward_entry, "normalize_backward_sum", _wanted_sums, floats)
ADD_NORM_BACKWARD = _backward(_add_backward_entry, "add_normalize_backward_sum", _wanted_sum_of_add, _ALIKE)
