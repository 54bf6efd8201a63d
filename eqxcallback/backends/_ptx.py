"""Read what PTX says of itself: its target, and what its kernels ask of their launches."""

import math
import re
from collections.abc import Mapping
from typing import Any

from ._image import Declared


_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_ENTRY = re.compile(r"\.entry\s+([\w$%]+)\s*(?:\(([^)]*)\))?([^{};]*)")
_THREADS = re.compile(r"\.(maxntid|reqntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")
_TYPE = re.compile(r"\.[bfsu](\d+)\b")
_LENGTH = re.compile(r"\[\s*(\d+)\s*\]\s*$")


def is_ptx(image: bytes) -> bool:
    """True if the image begins as PTX has to: with its version, after comments."""
    if b"\0" in image.rstrip(b"\0"):
        return False
    return _COMMENT.sub(" ", image[: 1 << 16].decode(errors="replace")).lstrip().startswith(".version")


def read_ptx(image: bytes) -> tuple[str, Mapping[str, Declared]]:
    """The target, such as `"sm_90a"`, and the kernels by name.

    **Raises:** `ValueError` if it has no target.
    """
    text = _COMMENT.sub(" ", image.rstrip(b"\0").decode(errors="replace"))
    target = re.search(r"^\s*\.target\s+(sm_\d+[af]?)", text, re.MULTILINE)
    if target is None:
        raise ValueError("PTX without a .target")
    return target[1], {name: _declared(parameters, rest) for name, parameters, rest in _ENTRY.findall(text)}


def _declared(parameters: str, directives: str) -> Declared:
    asked: dict[str, Any] = {}
    for kind, *sizes in _THREADS.findall(directives):
        threads = tuple(int(size or 1) for size in sizes)
        asked |= {"block": threads} if kind == "reqntid" else {"most_threads": math.prod(threads)}
    return Declared(tuple(map(_size, _split(parameters))), **asked)


def _split(declared: str) -> list[str]:
    return [part for part in declared.split(",") if part.strip()]


def _size(declared: str) -> int:
    """Return the bytes of a declaration such as `.param .align 8 .b8 name[24]`."""
    kind, length = _TYPE.search(declared), _LENGTH.search(declared.rstrip())
    if kind is None:
        raise ValueError(f"the parameter {declared.strip()!r}")
    bits = int(kind[1])
    return bits // 8 * int(length[1] if length else 1)
