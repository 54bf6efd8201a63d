"""SwiGLU. See cuda/swiglu.cu. Packed is where gate and up are one array."""

import math
from typing import Any

from ..kernel import CudaKernel, Launch
from ._geometry import FOLDER, ceil, name, pack


def _entry(what: str, gate: Any, up: Any) -> str:
    return name(f"swiglu{'_packed' if up is None else ''}{what}", gate)


def _size(gate: Any, up: Any) -> int:
    """Of a result's row."""
    return gate.shape[-1] // 2 if up is None else gate.shape[-1]


def _rows(gate: Any) -> int:
    return math.prod(gate.shape[:-1])


def _blocks(gate: Any, up: Any) -> int:
    count, at_once = _rows(gate) * _size(gate, up), pack(gate)
    if up is None and _size(gate, up) % at_once:  # rows begin anywhere
        at_once = 1
    return ceil(ceil(count, at_once), 256)


def _forward(gate: Any, up: Any = None) -> tuple[Any, Any]:
    return gate, up


def _backward(grads: Any, args: Any, out: Any, cotangents: Any) -> tuple[Any, Any]:
    return _forward(*args)


def _kernel(what: str, arguments: Any) -> CudaKernel:
    """`arguments`: gate and up of what the kernel's functions are called with."""
    return CudaKernel(
        FOLDER / "swiglu.cu",
        lambda *args: _entry(what, *arguments(*args)),
        Launch(grid=lambda *args: _blocks(*arguments(*args)), block=256),
        scalars={
            "rows": ("int64", lambda *args: _rows(arguments(*args)[0])),
            "size": ("int64", lambda *args: _size(*arguments(*args))),
        },
    )


SWIGLU, SWIGLU_BACKWARD = _kernel("", _forward), _kernel("_backward", _backward)
