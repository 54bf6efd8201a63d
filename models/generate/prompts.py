"""Files of prompts."""

import pathlib
import sys

from .._program import UsageError
from .._text import parse_json, read_lines, read_stdin, read_text


def read_prompts(path: pathlib.Path) -> list[tuple[str, dict[str, str]]]:
    """The prompts of a file, each with the place where it is, such as `prompts.txt:3`.

    A line is a prompt; empty lines are left out. In a file whose name ends with `.jsonl` a line is a JSON object with a `prompt`
    and, if need be, a `system` message.

    **Raises:** `UsageError`, which says what was expected, and in which line.
    """
    is_json = path.suffix == ".jsonl"
    prompts = [
        (place, _parsed(place, line) if is_json else {"prompt": line.strip()}) for place, line in read_lines(path)
    ]
    if not prompts:
        raise UsageError(f"{path}: expected at least one prompt; got empty lines alone")
    return prompts


def read_prompt(path: pathlib.Path) -> str:
    """The text of a file, or of stdin for `-`, without the space around it. Raises `UsageError`."""
    if str(path) != "-":
        text = read_text(path)
    elif sys.stdin is not None:
        text = read_stdin()
    else:
        raise UsageError("expected stdin, for --prompt-file -; it is closed")
    if not text.strip():
        raise UsageError(f"{path}: expected a prompt; got space alone")
    return text.strip()


def _parsed(place: str, line: str) -> dict[str, str]:
    record = parse_json(place, line)
    fits = isinstance(record, dict) and "prompt" in record and record.keys() <= {"prompt", "system"}
    if not fits or not all(isinstance(value, str) for value in record.values()):
        raise UsageError(
            f'{place}: expected an object with a "prompt" and, if need be, a "system", both text; got {line.strip():.80}'
        )
    return record
