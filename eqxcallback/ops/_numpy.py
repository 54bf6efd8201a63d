"""One body for both: NumPy's arrays over buffers on a CPU, CuPy's on a GPU."""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from ..core import PyTree


# NumPy's array on a CPU, CuPy's on a GPU: CuPy need not be installed.
XpArray: TypeAlias = Any


def on_arrays(body: Callable[..., None]) -> Callable[..., None]:
    """A kernel `(ctx, out, *args, **options)` of the `body(xp, out, *args, **options)`, which has arrays in place of buffers, and
    `numpy` or `cupy` as `xp`.
    """

    @functools.wraps(body)
    def kernel(ctx: Any, out: XpArray, *args: object, **options: object) -> None:
        on_cpu = ctx.platform == "cpu"
        xp = np if on_cpu else importlib.import_module("cupy")

        def arrays(tree: PyTree) -> XpArray:
            if tree is None or isinstance(tree, tuple):
                return tree if tree is None else tuple(map(arrays, tree))
            return tree.numpy() if on_cpu else tree.cupy()

        # On XLA's stream, and without warnings of what floats do: NaN and infinity are results like others.
        with ctx, np.errstate(all="ignore"):
            body(xp, arrays(out), *map(arrays, args), **options)

    return kernel


def wide(x: XpArray) -> XpArray:
    """Cast to the dtype that kernels compute in: f32, or f64 for f64."""
    return x.astype(np.float64 if x.dtype == np.float64 else np.float32, copy=False)


def store(out: XpArray, value: XpArray) -> None:
    """Rounded once."""
    out[...] = value.astype(out.dtype, copy=False)


def to_host(x: XpArray) -> np.ndarray:
    """Copy to the host what Python has to know, such as where to write."""
    return x if isinstance(x, np.ndarray) else x.get()


def append(out: XpArray, rows: XpArray, position: XpArray, *, row_rank: int) -> None:
    """Writes rows into `out` from a position on, clamped so that all fit: see `_reference_append`."""
    batch = out.shape[: out.ndim - row_rank - 1]
    length, count = out.shape[len(batch)], rows.shape[len(batch)]
    first = np.broadcast_to(np.clip(to_host(position), 0, length - count), batch)
    for index in np.ndindex(batch):
        out[index][first[index] : first[index] + count] = rows[index]


def finite(highest: XpArray, xp: ModuleType) -> XpArray:
    """A maximum, of which anything can be subtracted: that of nothing is -inf."""
    return xp.where(highest == -np.inf, xp.zeros_like(highest), highest)
