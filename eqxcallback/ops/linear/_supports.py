"""The encodings that kernels other than those of CPUs have."""

from collections.abc import Sequence


# Of kernels in Python.
TWO_ENCODINGS = ("Q4_1", "Q8_0")


def has_encoding(encoding: str, encodings: Sequence[str] = TWO_ENCODINGS) -> bool | str:
    """True if `encoding` is one of those that a kernel has."""
    *most, last = encodings
    return True if encoding in encodings else f"it has the encodings {', '.join(most)} and {last}; this is {encoding}"
