"""Files that are whole whenever somebody reads them."""

import os
import pathlib
from collections.abc import Callable


def replace_file(path: str | os.PathLike[str], write: Callable[[pathlib.Path], object]) -> None:
    """Write a file in two steps: who has the old one mapped keeps it, and nobody reads half of the new one.

    **Arguments:**

    - `path`: of the file.
    - `write`: writes to the path that it is given, in the same folder.
    """
    path = pathlib.Path(path)
    partial = path.with_name(f"{path.name}.partial")
    try:
        write(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
