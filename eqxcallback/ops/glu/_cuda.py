"""Gated linear units. See glu.cu."""

import math
from collections.abc import Callable
from typing import Any

from ...core import PyTree, ShapeAndDtype, Types
from ...kernel import CudaKernel, Launch
from .._cuda import FOLDER, ceil, name, pack
from .._supports import floats


# Activations are named as in glu.cu.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def _size(gate: ShapeAndDtype, up: ShapeAndDtype | None) -> int:
    """The length of a result's row. Without `up`, `gate` holds both halves."""
    return gate.shape[-1] // 2 if up is None else gate.shape[-1]


def _rows(gate: ShapeAndDtype) -> int:
    return math.prod(gate.shape[:-1])


def _blocks(gate: ShapeAndDtype, up: ShapeAndDtype | None) -> int:
    count, at_once = _rows(gate) * _size(gate, up), pack(gate)
    if up is None and _size(gate, up) % at_once:  # rows begin anywhere
        at_once = 1
    return ceil(ceil(count, at_once), 256)


def _forward(gate: ShapeAndDtype, up: ShapeAndDtype | None = None, **_: object) -> tuple[Any, Any]:
    return gate, up


def _backward(grads: PyTree, args: PyTree, out: PyTree, cotangents: PyTree, **_: object) -> tuple[Any, Any]:
    return _forward(*args)


def _supports(types: Types, *, activation: str, **options: object) -> bool | str:
    if activation not in ACTIVATIONS:
        return f"it has no activation {activation!r}"
    return floats(types, **options)


def _kernel(what: str, arguments: Callable[..., tuple[Any, Any]]) -> CudaKernel:
    """`arguments`: gate and up of what the kernel's functions are called with."""

    def entry(*args: object, activation: str, **_: object) -> str:
        gate, up = arguments(*args)
        return name(what, gate, f"eqxcallback::{activation}", up is None)

    return CudaKernel(
        FOLDER / "glu" / "glu.cu",
        entry,
        Launch(grid=lambda *args, **_: _blocks(*arguments(*args)), block=256),
        scalars={
            "rows": ("int64", lambda *args, **_: _rows(arguments(*args)[0])),
            "size": ("int64", lambda *args, **_: _size(*arguments(*args))),
        },
        supports=_supports,
    )


GLU, GLU_BACKWARD = _kernel("glu", _forward), _kernel("glu_backward", _backward)
