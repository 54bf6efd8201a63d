"""RMS norm and layer norm. See cuda/norm.cu."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..kernel import CudaKernel, Launch
from ._geometry import FOLDER, MULTIPROCESSORS, block_of_rows, ceil, name, of_first


# The dynamic shared memory in which a block sums the gradients of parameters, if they fit.
_SHARED_BYTES = 96 << 10


def _entry(norm: str, x: Any, parameters: Sequence[Any], what: str = "") -> str:
    """`parameters`: the weight, and of layer norm the bias, or `None`."""
    has_weight, *has_bias = (parameter is not None for parameter in parameters)
    if has_bias == [False] and has_weight:
        which = "_weight"
    elif has_bias == [True] and not has_weight:
        which = "_bias"
    else:
        which = "" if has_weight else "_plain"
    return name(f"{norm}{which}{what}", x)


def _rows(x: Any) -> int:
    return math.prod(x.shape[:-1])


def _block(x: Any) -> tuple[int, int]:
    return block_of_rows(x, packs=4, most=512, least=128)


def _backward_block(x: Any) -> tuple[int, int]:
    return block_of_rows(x, packs=2, most=512, least=256)


def _parts(x: Any) -> int:
    """The blocks of the backward kernel: those that run at a time, each of which sums over its rows."""
    threads, rows = _backward_block(x)
    return max(1, min(ceil(_rows(x), rows), MULTIPROCESSORS * max(1, 768 // (threads * rows))))


def _forward(norm: str, num_parameters: int) -> CudaKernel:
    def entry(x: Any, *parameters: Any, eps: float) -> str:
        return _entry(norm, x, (*parameters, None, None)[:num_parameters])

    return CudaKernel(
        FOLDER / "norm.cu",
        entry,
        Launch(grid=lambda x, *_, **__: ceil(_rows(x), _block(x)[1]), block=lambda x, *_, **__: _block(x)),
        scalars={
            "rows": ("int64", lambda x, *_, **__: _rows(x)),
            "size": ("int64", lambda x, *_, **__: x.shape[-1]),
            "eps": "float32",
        },
    )


def _backward(norm: str, num_parameters: int) -> CudaKernel:
    def entry(what: str) -> Any:
        def of(grads: Any, args: Any, *_: Any, **__: Any) -> str:
            x, *parameters = args
            return _entry(norm, x, (*parameters, None, None)[:num_parameters], what if _sums(args) else "_backward")

        return of

    def shared_bytes(grads: Any, args: Any, *_: Any, **__: Any) -> int:
        wanted = _backward_block(args[0])[1] * _sums(args) * args[0].shape[-1] * 4
        return wanted if wanted <= _SHARED_BYTES else 0

    def workspaces(grads: Any, args: Any, *_: Any, **__: Any) -> list[jax.ShapeDtypeStruct]:
        shape = _parts(args[0]), _sums(args), args[0].shape[-1]
        return [jax.ShapeDtypeStruct(shape, jnp.float32)] if _sums(args) else []

    def blocks_of_sums(grads: Any, args: Any, *_: Any, **__: Any) -> int:
        return ceil(args[0].shape[-1], 32) if _sums(args) else 0

    return CudaKernel(
        FOLDER / "norm.cu",
        entry("_backward"),
        [
            Launch(grid=of_first(_parts), block=of_first(_backward_block), shared_bytes=shared_bytes),
            Launch(grid=blocks_of_sums, block=(32, 8), entry=entry("_backward_sum")),
        ],
        scalars={
            "rows": ("int64", of_first(_rows)),
            "size": ("int64", of_first(lambda x: x.shape[-1])),
            "parts": ("int64", of_first(_parts)),
            "eps": "float32",
        },
        workspaces=workspaces,
    )


def _sums(args: Sequence[Any]) -> int:
    """How many gradients are sums over rows: those of the parameters that there are."""
    return sum(parameter is not None for parameter in args[1:])


RMS_NORM, RMS_NORM_BACKWARD = _forward("rms_norm", 1), _backward("rms_norm", 1)
LAYER_NORM, LAYER_NORM_BACKWARD = _forward("layer_norm", 2), _backward("layer_norm", 2)
