"""Snapshots of a training that goes on where the last one was, to the bit.

A snapshot is a file: a line of JSON with the step and the options of the run, the arrays as Equinox writes them, and the CRC-32
of all that. It appears under its name when it is whole and on the disk. The last two are kept, in case the disk spoils one.
"""

import json
import os
import pathlib
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any, TypeVar

import equinox as eqx

from .._errors import ModelFileError
from .._replacing import sync


_KEPT = 2
_SUFFIX, _UNFINISHED = ".snapshot", ".unfinished"
_CHECKSUM_BYTES, _CHUNK = 4, 1_000_000

_T = TypeVar("_T")


class _Summed:
    """A file that is written, and the CRC-32 of what was written to it."""

    def __init__(self, file: IO[bytes]):
        self._file, self.checksum = file, 0

    def write(self, data: Any) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        return self._file.write(data)


def save(folder: pathlib.Path, step: int, state: Any, options: Mapping[str, Any]) -> None:
    """Write a snapshot, and remove all but the last two.

    **Arguments:**

    - `step`: the number of steps behind it.
    - `state`: a PyTree of arrays.
    - `options`: which a run must have to go on from it: anything that JSON keeps.

    **Raises:** `OSError` if it cannot be written. Then nothing of it is left.
    """
    path = folder / f"step-{step:08}{_SUFFIX}"
    unfinished = path.with_suffix(_UNFINISHED)
    for old in folder.glob(f"*{_UNFINISHED}"):  # of a process that was killed: this one may need the room
        old.unlink()
    try:
        with unfinished.open("wb") as file:
            summed = _Summed(file)
            summed.write(json.dumps({"step": step, "options": options}).encode() + b"\n")
            _write_arrays(summed, state)
            file.write(summed.checksum.to_bytes(_CHECKSUM_BYTES, "big"))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync(folder)  # the new name too
    for old in _paths(folder)[:-_KEPT]:
        old.unlink()


def load_last(
    folder: pathlib.Path,
    like: _T,
    options: Mapping[str, Any],
    report: Callable[[str], None],
    progress: Callable[..., Iterable[Any]] = lambda items, **_: items,
) -> tuple[int, _T] | None:
    """Read the last snapshot that is whole.

    **Arguments:**

    - `like`: the structure of the state: `ShapeDtypeStruct`s in place of arrays.
    - `options`: of the run.
    - `report`: gets a line for each snapshot that is not whole, if there is an older one.
    - `progress`: as `_program.progress`.

    **Returns:** the number of steps behind it, and the state; None if there is no snapshot.

    **Raises:**

    - `ModelFileError` if no snapshot is whole, or the last one that is has other options.
    """
    problem = None
    for path in reversed(_paths(folder)):
        if problem is not None:
            report(f"{problem}; the one before is taken")
        try:
            _check_whole(path, progress)
        except (ModelFileError, OSError) as error:
            problem = str(error)
            continue
        return _load(path, like, options)
    if problem is not None:
        raise ModelFileError(f"{problem}, and there is no other one. Remove it to begin with step 0.")
    return None


def _write_arrays(file: _Summed, state: Any) -> None:
    try:
        eqx.tree_serialise_leaves(file, state)  # pyright: ignore[reportArgumentType]
    except RuntimeError as error:  # Equinox's, which name an array, around that of a disk which is full
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__
        raise cause or error from None


def _paths(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.glob(f"step-*{_SUFFIX}"))


def _check_whole(path: pathlib.Path, progress: Callable[..., Iterable[Any]]) -> None:
    summed, checksum = path.stat().st_size - _CHECKSUM_BYTES, 0
    with path.open("rb") as file:
        for start in progress(range(0, summed, _CHUNK), desc="checking the snapshot", unit="MB"):
            checksum = zlib.crc32(file.read(min(summed - start, _CHUNK)), checksum)
        if summed < 0 or file.read() != checksum.to_bytes(_CHECKSUM_BYTES, "big"):
            raise ModelFileError(f"expected {path} to be whole; its checksum is another: it was cut or changed")


def _load(path: pathlib.Path, like: _T, options: Mapping[str, Any]) -> tuple[int, _T]:
    with path.open("rb") as file:
        header = json.loads(file.readline())
        for name, value in header["options"].items():
            if name not in options or options[name] != value:
                raise ModelFileError(
                    f"expected {name} {value!r}, which {path} was written with; got {options.get(name)!r}. "
                    "Put the run's options back."
                )
        try:
            return header["step"], eqx.tree_deserialise_leaves(file, like)
        except (RuntimeError, ValueError, EOFError) as error:
            raise ModelFileError(f"expected the arrays of this model in {path}; got {error}") from None
