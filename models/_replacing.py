"""Files that are whole whenever somebody reads them."""

import contextlib
import os
import pathlib
import secrets
from collections.abc import Callable, Mapping


Write = Callable[[pathlib.Path], object]
"""Write a file to a path, which is not yet its own."""


def replace_file(path: str | os.PathLike[str], write: Write) -> None:
    """Write a file in two steps: who has the old one mapped keeps it, and nobody reads half of the new one.

    The new file has the permissions of any new file, whatever those of the old one were.

    **Arguments:**

    - `path`: of the file. Of a link, it is the file that the link points to.
    - `write`: writes to the path that it is given, in the same folder, where no other process writes.

    **Raises:** `OSError` if it cannot be written. Then the old file is as it was.
    """
    replace_files({path: write})


def replace_files(writes: Mapping[str | os.PathLike[str], Write]) -> None:
    """Write files that belong together, so that nobody reads an old one with a new one.

    Nothing changes before all of them are on the disk. Then the last one is removed, and comes back when the others are new: it
    is the file that readers ask for first, and they refuse what has none.

    **Arguments:**

    - `writes`: for each path what writes the file; see `replace_file`.

    **Raises:** `OSError` if one of them cannot be written. Then the old files are as they were.
    """
    with contextlib.ExitStack() as stack:
        moves: list[tuple[pathlib.Path, pathlib.Path]] = []
        for path, write in writes.items():
            target = pathlib.Path(os.path.realpath(path))
            partial = target.with_name(f".{secrets.token_hex(8)}.partial")
            stack.callback(partial.unlink, missing_ok=True)
            try:
                partial.touch(exist_ok=False)
            except OSError as error:  # which names a file that nobody knows
                raise OSError(error.errno, f"{os.fspath(path)}: {error.strerror}") from None
            mode = partial.stat().st_mode
            write(partial)
            partial.chmod(mode)  # safetensors puts a file of its own there, for its owner alone
            sync(partial)
            moves.append((partial, target))
        _, last = moves[-1]
        if len(moves) > 1:
            last.unlink(missing_ok=True)
            sync(last.parent)
        for partial, target in moves:
            partial.replace(target)
            sync(target.parent)


def sync(path: pathlib.Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
