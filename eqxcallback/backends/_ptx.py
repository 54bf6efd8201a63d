"""What PTX says of itself: its target, and the parameters of its kernels."""

import re
from collections.abc import Mapping


_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_ENTRY = re.compile(r"\.entry\s+([\w$%]+)\s*(?:\(([^)]*)\))?")
_TYPE = re.compile(r"\.[bfsu](\d+)\b")
_LENGTH = re.compile(r"\[\s*(\d+)\s*\]\s*$")


def is_ptx(image: bytes) -> bool:
    """Whether it begins as PTX has to: with its version, after comments."""
    if b"\0" in image.rstrip(b"\0"):
        return False
    return _COMMENT.sub(" ", image[: 1 << 16].decode(errors="replace")).lstrip().startswith(".version")


def read_ptx(image: bytes) -> tuple[str, Mapping[str, tuple[int, ...]]]:
    """The target, such as `"sm_90a"`, and the sizes of the parameters of each kernel.

    **Raises:** `ValueError` if it has no target.
    """
    text = _COMMENT.sub(" ", image.rstrip(b"\0").decode(errors="replace"))
    target = re.search(r"^\s*\.target\s+(sm_\d+[af]?)", text, re.MULTILINE)
    if target is None:
        raise ValueError("PTX without a .target")
    return target[1], {name: tuple(map(_size, _split(declared))) for name, declared in _ENTRY.findall(text)}


def _split(declared: str) -> list[str]:
    return [each for each in declared.split(",") if each.strip()]


def _size(declared: str) -> int:
    """Of a declaration such as `.param .align 8 .b8 name[24]`."""
    kind, length = _TYPE.search(declared), _LENGTH.search(declared.rstrip())
    if kind is None:
        raise ValueError(f"the parameter {declared.strip()!r}")
    bits = int(kind[1])
    return bits // 8 * int(length[1] if length else 1)
