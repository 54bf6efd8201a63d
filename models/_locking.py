"""Folders for one process at a time."""

import contextlib
import fcntl
import pathlib
from collections.abc import Iterator

from ._errors import ModelFileError


LOCK = "lock"
"""The name of the file in such a folder."""


@contextlib.contextmanager
def locked(folder: pathlib.Path, mark: bytes) -> Iterator[None]:
    """Make a folder, and keep other processes out; the end of this one lets them in, whatever its end is.

    **Arguments:**

    - `mark`: a text for a new lock, which says whose it is.

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
