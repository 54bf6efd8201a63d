"""The data that a compiled kernel is launched with."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..kernel import dims


_LARGEST_CLUSTER = 16
# Of the memory that XLA plans on a GPU.
_ALIGNMENT = 128


@dataclasses.dataclass(frozen=True)
class Step:
    """One launch.

    **Attributes:**

    - `image`: the number of its image.
    - `entry`: the kernel's name there.
    - `cluster`, `cooperative`, `programmatic`: as [`eqxcallback.Launch`][] has them.
    - `spread`: whether the blocks of a cluster run on as many multiprocessors as there are.
    - `scratch_bytes`: of the memory that the compiler wants for this launch.
    """

    image: int
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    cluster: tuple[int, int, int] = (1, 1, 1)
    cooperative: bool = False
    programmatic: bool = False
    spread: bool = False
    scratch_bytes: int = 0

    @classmethod
    def checked(
        cls,
        image: int,
        entry: str,
        what: str,
        *,
        grid: Any,
        block: Any,
        shared_bytes: Any,
        cluster: Any = 1,
        **attributes: Any,
    ) -> "Step":
        """Make a step, and check the limits that all GPUs have. `what` begins an error, and ends with the kernel's name."""
        grid, block = dims(grid, f"{what}: expected grid"), dims(block, f"{what}: expected block")
        cluster = dims(cluster, f"{what}: expected cluster")
        if grid[0] >= 2**31 or max(grid[1:]) > 65535:
            raise ValueError(f"{what}: expected grid to be at most (2147483647, 65535, 65535); got {grid}.")
        if not 0 < math.prod(block) <= 1024 or block[2] > 64:
            raise ValueError(f"{what}: expected block to have 1 to 1024 threads, and 64 in z; got {block}.")
        if not 0 < math.prod(cluster) <= _LARGEST_CLUSTER:
            raise ValueError(f"{what}: expected cluster to have 1 to {_LARGEST_CLUSTER} blocks; got {cluster}.")
        if any(blocks % size for blocks, size in zip(grid, cluster, strict=True)):
            raise ValueError(
                f"{what}: expected grid to be a multiple of cluster, {cluster}; got {grid}. Round it up, and let the "
                "kernel leave out what is beyond the end."
            )
        try:
            shared = shared_bytes.__index__()
        except AttributeError:
            shared = -1
        if not 0 <= shared < 2**31:
            raise TypeError(f"{what}: expected shared_bytes to be a number of bytes; got {shared_bytes!r}.")
        return cls(image, entry, grid, block, shared, cluster, **attributes)

    @property
    def needs_hopper(self) -> bool:
        return self.cluster != (1, 1, 1) or self.programmatic

    @property
    def attributes(self) -> tuple[int, ...]:
        """Return what is asked for beyond the geometry, as the launcher takes it."""
        return (*self.cluster, self.cooperative, self.programmatic, self.spread)


_NO_ATTRIBUTES = (1, 1, 1, 0, 0, 0)


@dataclasses.dataclass(frozen=True)
class Program:
    """Compiled code, and how it is launched.

    **Attributes:**

    - `hidden`: the number of pointers after all parameters that the compiler has added. The first of them is to scratch memory,
        if a step wants some; the others may be null.
    """

    images: tuple[bytes, ...]
    steps: tuple[Step, ...]
    hidden: int = 0

    @property
    def scratch_bytes(self) -> int:
        """The size of the scratch memory of all steps."""
        return sum(map(_rounded, self.steps))

    def attributes(self, words: np.ndarray) -> dict[str, Any]:
        """Return the attributes for the launcher, except the nulls. `words` are the values of the call."""
        attributes: dict[str, Any] = {
            "images": np.frombuffer(b"".join(self.images), np.uint8),
            "sizes": np.array([len(image) for image in self.images], np.int64),
            "entries": "\n".join(step.entry for step in self.steps),
            "geometry": np.array([(*s.grid, *s.block, s.shared_bytes, s.image) for s in self.steps], np.int64).ravel(),
        }
        # An attribute that is an empty array has no type.
        if len(words) + self.hidden:
            attributes["scalars"] = np.concatenate([words, np.zeros(self.hidden, np.int64)])
        if any(step.attributes != _NO_ATTRIBUTES for step in self.steps):
            attributes["attributes"] = np.array([step.attributes for step in self.steps], np.int64).ravel()
        if self.scratch_bytes:
            attributes["scratch"] = np.array([len(words), *_begins(self.steps)], np.int64)
        return attributes


def _rounded(step: Step) -> int:
    return -(-step.scratch_bytes // _ALIGNMENT) * _ALIGNMENT


def _begins(steps: Sequence[Step]) -> list[int]:
    """Each step has memory of its own: one that is launched programmatically begins before the one ahead has ended."""
    return [sum(map(_rounded, steps[:i])) for i in range(len(steps))]


def check_scratch(alignment: int, what: str) -> None:
    if alignment > _ALIGNMENT:
        raise ValueError(
            f"{what}: expected scratch memory at multiples of {_ALIGNMENT} bytes, as XLA has it; the compiler wants {alignment}. "
            "Pass a workspace."
        )
