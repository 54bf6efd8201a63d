"""Files that are whole whenever somebody reads them."""

import contextlib
import fcntl
import os
import pathlib
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping


Write = Callable[[pathlib.Path], object]
"""Write a file to a path, which is not yet its own."""


def replace_file(path: str | os.PathLike[str], write: Write) -> None:
    """Write a file in two steps: who has the old one mapped keeps it, and nobody reads half of the new one.

    The new file has the permissions of any new file, whatever those of the old one were. Until it is whole, it is in a hidden
    folder beside its path; what a process that was killed left there is removed when the file is written again.

    **Arguments:**

    - `path`: of the file. Of a link, it is the file that the link points to.
    - `write`: writes to the path that it is given, where no other process writes.

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
            try:
                partial = stack.enter_context(_folder_for(target)) / target.name
                partial.touch()
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


@contextlib.contextmanager
def _folder_for(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Make a hidden folder beside a file, for this process alone, and remove those of processes that were killed.

    A lock says whose process lives. It is the folder's, as some writers put another file in place of the one that they are given.
    """
    start = os.fsdecode(b"." + os.fsencode(target.name)[:200] + b".")  # a name has 255 bytes at most
    for name in os.listdir(target.parent):
        if re.fullmatch(re.escape(start) + "[0-9a-f]{16}[.]partial", name):
            with _locked(target.with_name(name)) as is_ours:
                if is_ours:
                    shutil.rmtree(target.with_name(name), ignore_errors=True)
    folder = target.with_name(f"{start}{secrets.token_hex(8)}.partial")
    new = folder.with_suffix(".new")  # nobody looks for it before it has its lock
    new.mkdir()
    with _locked(new):
        try:
            yield new.rename(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[bool]:
    """Lock a folder, and say if that was possible: if it is there, no process has it, and its disk knows locks."""
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


def sync(path: pathlib.Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
