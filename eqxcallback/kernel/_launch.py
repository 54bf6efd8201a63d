"""The geometry of a launch on a GPU."""

import dataclasses
from collections.abc import Callable
from typing import Any


Dims = int | tuple[int, ...]
"""Up to three sizes, `x` first; the others are 1."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Each field but the last two may be a function of the op's arguments and options, as `out_type` is. It is called with the types
    that the kernel sees, which under `vmap` have more axes.

    **Arguments:**

    - `grid`: the number of blocks: an integer, or up to three. Where one of them is 0, nothing is launched.
    - `block`: the number of threads in a block, likewise.
    - `shared_bytes`: of dynamic shared memory for a block. More than 48 KiB are asked for where the device has them.
    - `entry`: the kernel to launch, by default the one of the [`eqxcallback.CudaKernel`][].
    - `cluster`: the number of blocks in a cluster, which run together and see each other's shared memory: up to 16, of which each
        dimension divides that of the grid. Devices from 9.0 on have them.
    - `cooperative`: whether all blocks run at once, so that they may wait for each other: `grid.sync()` of
        `<cooperative_groups.h>`. The driver refuses a grid that does not fit the device.
    - `programmatic`: whether the kernel may begin before what is ahead of it on the stream has ended. It has to call
        `cudaGridDependencySynchronize()`, the PTX `griddepcontrol.wait`, before it reads or writes global memory. Devices
        from 9.0 on have it.
    """

    grid: Dims | Callable[..., Dims]
    block: Dims | Callable[..., Dims]
    shared_bytes: int | Callable[..., int] = 0
    entry: str | Callable[..., str] | None = None
    cluster: Dims | Callable[..., Dims] = 1
    cooperative: bool = False
    programmatic: bool = False

    def __post_init__(self) -> None:
        for name in ("grid", "block", "cluster"):
            value = getattr(self, name)
            if not callable(value):
                dims(value, f"Launch: expected {name}")
        if not callable(self.shared_bytes) and (type(self.shared_bytes) is not int or self.shared_bytes < 0):
            raise TypeError(f"Launch: expected shared_bytes to be a number of bytes; got {self.shared_bytes!r}.")
        if not (self.entry is None or isinstance(self.entry, str) or callable(self.entry)):
            raise TypeError(f"Launch: expected entry to be the name of a kernel; got {self.entry!r}.")
        for name in ("cooperative", "programmatic"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"Launch: expected {name} to be True or False; got {getattr(self, name)!r}.")


def dims(value: Any, what: str) -> tuple[int, int, int]:
    """`value` as three sizes. Raises an error that begins with `what` if it is none."""
    sizes = value if isinstance(value, tuple | list) else (value,)
    try:
        integers = [size.__index__() for size in sizes]  # NumPy's integers as well
    except AttributeError:
        integers = []
    if (
        not 1 <= len(integers) <= 3
        or any(size < 0 for size in integers)
        or any(isinstance(size, bool) for size in sizes)
    ):
        raise TypeError(f"{what} to be an integer or up to three, none negative; got {value!r}.")
    x, y, z = (*integers, 1, 1)[:3]
    return x, y, z
