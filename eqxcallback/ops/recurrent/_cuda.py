"""The gates of recurrent cells, after their products. See recurrent.cu."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...core import PyTree, ShapeAndDtype
from ...kernel import CudaKernel, Launch
from .._cuda import FOLDER, ceil, multiprocessors, name, pack
from .._supports import floats_alike


_BLOCK = 32, 8


def _rows(state: ShapeAndDtype) -> int:
    return math.prod(state.shape[:-1])


def _grid(state: ShapeAndDtype) -> tuple[int, int]:
    """Packs of columns, if these are whole packs, and parts of the rows."""
    size, at_once = state.shape[-1], pack(state)
    columns = ceil(size if size % at_once else size // at_once, _BLOCK[0])
    return columns, max(1, min(ceil(_rows(state), _BLOCK[1]), 8 * multiprocessors() // max(columns, 1)))


def _of_state(function: Callable[[Any], Any], index: int, *, backward: bool) -> Callable[..., Any]:
    """`function` of the state of the cell, which is the argument `index`, as a function of what a kernel's are called with."""

    def forward_of(*args: object, **_: object) -> Any:
        return function(args[index])

    def backward_of(grads: PyTree, args: PyTree, *_: object, **__: object) -> Any:
        return function(args[index])

    return backward_of if backward else forward_of


def _kernel(entry: str, index: int, supports: Any, *, backward: bool = False) -> CudaKernel:
    def of(function: Callable[[Any], Any]) -> Callable[..., Any]:
        return _of_state(function, index, backward=backward)

    return CudaKernel(
        FOLDER / "recurrent" / "recurrent.cu",
        of(lambda state: name(entry, state)),
        Launch(grid=of(_grid), block=_BLOCK),
        scalars={"rows": ("int64", of(_rows)), "size": ("int64", of(lambda state: state.shape[-1]))},
        supports=supports,
    )


_ALIKE = floats_alike("cell")
LSTM_GATES = _kernel("lstm_gates", 1, _ALIKE)
LSTM_GATES_BACKWARD = _kernel("lstm_gates_backward", 1, _ALIKE, backward=True)


def _wants_sum(grads: PyTree) -> bool:
    return len(grads) > 3 and grads[3] is not None


def _workspaces(grads: PyTree, args: PyTree, *_: object, **__: object) -> list[jax.ShapeDtypeStruct]:
    # Without the sum it is empty, and still a parameter.
    hidden = args[2]
    return [jax.ShapeDtypeStruct((_grid(hidden)[1] * _wants_sum(grads), hidden.shape[-1]), jnp.float32)]


def _sum_entry(grads: PyTree, args: PyTree, *_: object, **__: object) -> str:
    # Where it is not launched, it need not be compiled.
    return name("gru_gates_backward_sum" if _wants_sum(grads) else "gru_gates_backward", args[2])


def _sum_blocks(grads: PyTree, args: PyTree, *_: object, **__: object) -> int:
    return ceil(args[2].shape[-1], 32) if _wants_sum(grads) else 0


def _of_hidden(function: Callable[[Any], Any]) -> Callable[..., Any]:
    return _of_state(function, 2, backward=True)


_GRU_ALIKE = floats_alike("hidden_gates", "hidden")
GRU_GATES = _kernel("gru_gates", 2, _GRU_ALIKE)
GRU_GATES_BACKWARD = CudaKernel(
    FOLDER / "recurrent" / "recurrent.cu",
    _of_hidden(lambda hidden: name("gru_gates_backward", hidden)),
    [
        Launch(grid=_of_hidden(_grid), block=_BLOCK),
        Launch(grid=_sum_blocks, block=_BLOCK, entry=_sum_entry),
    ],
    scalars={
        "rows": ("int64", _of_hidden(_rows)),
        "size": ("int64", _of_hidden(lambda hidden: hidden.shape[-1])),
        "parts": ("int64", _of_hidden(lambda hidden: _grid(hidden)[1])),
    },
    workspaces=_workspaces,
    supports=_GRU_ALIKE,
)
