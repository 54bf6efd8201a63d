"""Tools that the geometries of our kernels in CUDA C++ have in common."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax

from ..core import PyTree, ShapeAndDtype
from ..kernel import CudaKernel


FOLDER = pathlib.Path(__file__).parent

# The number in an H100 and an H200.
MULTIPROCESSORS = 132


def multiprocessors() -> int:
    """Return the multiprocessors of the smallest GPU of this process, or `MULTIPROCESSORS` if it has none.

    Blocks that work on several rows should be as many as run at a time: a few more would have the GPU to themselves in the end.
    Any number is right.
    """
    try:
        return min(device.core_count for device in jax.local_devices(backend="cuda"))
    except RuntimeError:  # there are none
        return MULTIPROCESSORS


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def name(kernel: str, x: ShapeAndDtype, *more: bool | int | str) -> str:
    """Names the instance of a template for the dtype of `x`. `more` are its other arguments."""
    arguments = (str(argument).lower() if isinstance(argument, bool) else str(argument) for argument in more)
    return f"eqxcallback::{kernel}<{', '.join([CudaKernel.ctype(x.dtype), *arguments])}>"


def pack(x: ShapeAndDtype) -> int:
    """Return the number of elements that a thread loads at once: 16 bytes."""
    return 16 // x.dtype.itemsize


def block_of_rows(x: ShapeAndDtype, *, packs: int, most: int, least: int) -> tuple[int, int]:
    """The block of kernels whose threads share the rows of `x`: threads of a row, and rows.

    **Arguments:**

    - `packs`: how many of 16 bytes a thread takes, as long as that needs no more than `most` threads.
    - `least`: threads in a block, which then has several rows.
    """
    in_row = ceil(x.shape[-1] * x.dtype.itemsize, 16)
    threads = min(max(32 * ceil(in_row, 32 * packs), 32), most)
    return threads, max(1, least // threads)


def of_first(function: Callable[[Any], Any]) -> Callable[..., Any]:
    """`function` of the first argument of an op, as a function of what a backward kernel is called with."""

    def of(grads: PyTree, args: PyTree, *_: object, **__: object) -> Any:
        return function(args[0])

    return of
