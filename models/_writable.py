"""Places for results, tried before the work whose results would be lost."""

import pathlib
import tempfile

from ._program import UsageError


def expect_writable(output: pathlib.Path) -> None:
    """Raise `UsageError` if no file can be made where `--output` is to be: in it, if it is a folder, or else beside it."""
    try:
        with tempfile.TemporaryFile(dir=output if output.is_dir() else output.parent) as file:
            file.write(b"\0")
    except OSError as error:
        raise UsageError(f"expected --output in a folder that can be written; got {output}: {error}") from None
