"""Folders for one program, and one process at a time."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator

from ._errors import ModelFileError


LOCK = "lock"
"""The name of the file in such a folder."""


def expect_own(folder: pathlib.Path, mark: bytes, option: str) -> None:
    """Raise `ModelFileError` if a folder has files, and the mark in its lock is not this one: they are another program's.

    **Arguments:**

    - `mark`: of `locked`.
    - `option`: by which the user chose the folder.
    """
    try:
        names = sorted(os.listdir(folder))
        found = (folder / LOCK).read_bytes() if LOCK in names else b""
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise ModelFileError(f"expected {folder} to be a folder that can be written; got {error}") from None
    # An empty lock is of a process that begins right now.
    others = [name for name in names if name != LOCK] or ([LOCK] if found else [])
    if others and found != mark:
        raise ModelFileError(
            f"expected a new folder, or an empty one; got {folder} with {others[0]}. Pass another {option}."
        )


@contextlib.contextmanager
def locked(folder: pathlib.Path, mark: bytes) -> Iterator[None]:
    """Make a folder, and keep other processes out; the end of this one lets them in, whatever its end is.

    **Arguments:**

    - `mark`: a text for a new lock, which says whose the folder is.

    **Raises:** `ModelFileError` if another process is in, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("ab")
    except (OSError, ValueError) as error:  # a ValueError: NUL in the path
        raise ModelFileError(f"expected {folder} to be a folder that can be written; got {error}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ModelFileError(
                f"expected {folder} for this process alone; another one trains there. Wait for it, or stop it."
            ) from None
        if file.tell() == 0:
            file.write(mark)
            file.flush()
        yield
