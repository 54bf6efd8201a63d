"""Text that programs read: files, stdin, and arguments."""

import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from ._program import UsageError


def read_text(path: pathlib.Path) -> str:
    """The text of a file in UTF-8, without the byte order mark that it may begin with. Lines end with `\\n`.

    **Raises:** `UsageError`.
    """
    return _decoded(str(path), path.read_bytes)


def read_stdin() -> str:
    """The text of stdin, which is not closed, as `read_text` reads it."""
    return _decoded("stdin", sys.stdin.buffer.read)


def read_lines(path: pathlib.Path) -> Iterator[tuple[str, str]]:
    """The lines of a text file that are not empty, each after the place where it is, such as `prompts.txt:3`.

    **Raises:** `UsageError`.
    """
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            yield f"{path}:{number}", line


def parse_json(place: str, line: str) -> Any:
    """Parse a line of `read_lines` as JSON. Raises `UsageError`."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place}: expected a JSON object; got {error}") from None


def without_surrogates(text: str) -> str:
    """Python has halves of characters, in arguments of a program, say; UTF-8 has not."""
    return text.encode("utf-8", "replace").decode()


def _decoded(name: str, read: Callable[[], bytes]) -> str:
    try:
        return read().decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UsageError(f"expected {name} to be UTF-8; got byte {byte:#x} at {error.start}") from None
    except (OSError, ValueError) as error:  # a ValueError: NUL in the path
        raise UsageError(f"expected {name} to be a file that can be read; got {error}") from None
