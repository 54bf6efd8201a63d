"""The launches of a call on a GPU, read from what the launcher is told."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from ._image import Compiled, kernels_of, readable


@dataclasses.dataclass(frozen=True)
class Launched:
    """One launch of a kernel.

    **Attributes:**

    - `entry`: the name of the kernel in `image`, the compiled code: a cubin, which `nvdisasm` reads, or PTX.
    - `grid`, `block`: the number of blocks, and of the threads of each.
    - `shared_bytes`: shared memory of a block.
    - `registers`: of a thread, and `stack_bytes`: its local memory, for what does not fit registers. `None` where the driver
        compiles PTX, when the kernel is loaded.
    """

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    registers: int | None
    stack_bytes: int | None
    image: bytes = dataclasses.field(repr=False)

    def __str__(self) -> str:
        parts = [
            f"{readable(self.entry)}: {_count(self.grid, 'block')} of {_count(self.block, 'thread')}",
            f"{self.shared_bytes:,} bytes of shared memory" if self.shared_bytes else "",
            "" if self.registers is None else f"{self.registers} registers",
            f"{self.stack_bytes:,} bytes of stack" if self.stack_bytes else "",
        ]
        return ", ".join(filter(None, parts))


def launched(attributes: Mapping[str, Any]) -> tuple[Launched, ...]:
    """**Arguments:** `attributes`: as `Program.attributes` writes them. Those of another lane launch nothing."""
    if "images" not in attributes:
        return ()
    images, at = [], 0
    for size in attributes["sizes"]:
        images.append(attributes["images"][at : at + size].tobytes())
        at += size
    launches = []
    for entry, numbers in zip(attributes["entries"].split("\n"), attributes["geometry"].reshape(-1, 8), strict=True):
        *geometry, shared, index = map(int, numbers)
        kernel = _kernels(images[index]).get(entry)
        grid, block = (tuple(geometry[:3]), tuple(geometry[3:]))
        static = 0 if kernel is None else kernel.shared_bytes
        usage = (None, None) if kernel is None else (kernel.registers, kernel.stack_bytes)
        launches.append(Launched(entry, grid, block, shared + static, *usage, image=images[index]))  # type: ignore[arg-type]
    return tuple(launches)


@functools.lru_cache(maxsize=512)
def _kernels(image: bytes) -> Mapping[str, Compiled]:
    return kernels_of(image) or {}


def _count(sizes: tuple[int, int, int], noun: str) -> str:
    """ "1 block", "12 blocks", "3 x 4 blocks"."""
    significant = max([i for i, size in enumerate(sizes) if size != 1], default=0) + 1
    text = " x ".join(f"{size:,}" for size in sizes[:significant])
    return f"{text} {noun}" if math.prod(sizes) == 1 else f"{text} {noun}s"
