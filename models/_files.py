"""The part of a model's files that a program needs, of whatever kind they are."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from .gguf import Config


class Weight(Protocol):
    """A tensor of a model's files."""

    @property
    def encoding(self) -> str:
        """The file's: `"F32"`, `"F16"`, `"BF16"`, or a quantised one."""
        ...

    @property
    def data(self) -> np.ndarray:
        """The values; if quantised, uint8 of shape `(rows, bytes_per_row)`. Read where it is asked for."""
        ...


class Files(Protocol):
    """A model's files, which have been checked: what `models.llama.load` takes."""

    @property
    def config(self) -> Config: ...

    @property
    def tensors(self) -> Mapping[str, Weight]:
        """By their names in GGUF files."""
        ...

    @property
    def rotates_neighbours(self) -> bool:
        """True if rows of queries and keys that are rotated with each other are neighbours, not halves of a head."""
        ...

    def forget_pages(self) -> None:
        """Take what was read out of memory, as nobody will read it again."""
        ...
