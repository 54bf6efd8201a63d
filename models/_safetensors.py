"""The tensors of safetensors files: read when they are asked for, and written."""

import json
import os
import pathlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ._errors import ModelFileError
from ._replacing import replace_file


# What NumPy, and so this reader, has of the format's types.
DTYPES = {
    "BOOL": np.dtype(bool),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "C64": np.dtype(np.complex64),
    **{f"F{bits}": np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)},
    **{f"I{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)},
}
INDEX = "model.safetensors.index.json"
_REMEDY = "Pass a safetensors file, or a folder of them."


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: `read` copies it into memory."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[], np.ndarray]
    encoding: str | None = None
    """As GGUF files name it; safetensors files have dtypes alone."""


def open_tensors(path: str | os.PathLike[str]) -> dict[str, Stored]:
    """The tensors of a safetensors file, by their names; or of all such files of a folder, or of those that its index names.

    **Raises:**

    - `ModelFileError`, whatever is wrong with a file.
    """
    path = pathlib.Path(path)
    if not path.is_dir():
        return _of_file(path)
    tensors: dict[str, Stored] = {}
    for file in weight_files(path):
        of_file = _of_file(file)
        if both := tensors.keys() & of_file.keys():
            raise ModelFileError(f"{file}: expected each tensor in one file; got {min(both)!r} again. {_REMEDY}")
        tensors |= of_file
    return tensors


def weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The safetensors files of a folder: those that its index names, or all if it has no index. Raises `ModelFileError`."""
    index = folder / INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if elsewhere := [name for name in names if pathlib.Path(name).name != name]:
                raise ValueError(f"{elsewhere[0]!r}, which is not a file of this folder")
            return [folder / name for name in names]
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ModelFileError(f"{index}: expected an index of files; got {error!r}. Get it again.") from None
    if files := sorted(folder.glob("*.safetensors")):
        return files
    raise ModelFileError(f"{folder}: expected a folder with safetensors files; got none in it. {_REMEDY}")


def write_tensors(path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, which is replaced once the new one is whole.

    **Arguments:**

    - `path`: the file.
    - `tensors`: by their names, in rows, and of one of `DTYPES`.
    - `metadata`: texts in the file's header.

    **Raises:** `OSError` if the file cannot be written.
    """

    def write(partial: pathlib.Path) -> None:
        try:
            save_file(dict(tensors), partial, dict(metadata))
        except SafetensorError as error:  # also of a full disk, or a folder in which nobody may write
            raise OSError(f"{os.fspath(path)}: {error}") from None

    replace_file(path, write)


def _of_file(path: pathlib.Path) -> dict[str, Stored]:
    try:
        file: Any = safe_open(path, "np")
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path}: expected a file that can be read; got {error}. {_REMEDY}") from None
    except SafetensorError as error:
        raise ModelFileError(
            f"{path}: expected a safetensors file that is whole; got: {error}. Get it again."
        ) from None
    return {name: _stored(path, file, name) for name in file.keys()}  # noqa: SIM118, as it is not a mapping


def _stored(path: pathlib.Path, file: Any, name: str) -> Stored:
    part = file.get_slice(name)
    if part.get_dtype() not in DTYPES:
        raise ModelFileError(
            f"{path}: expected tensor {name!r} to be of one of {', '.join(DTYPES)}; got {part.get_dtype()}, which is not "
            "supported."
        )
    return Stored(tuple(part.get_shape()), DTYPES[part.get_dtype()], lambda: file.get_tensor(name))
