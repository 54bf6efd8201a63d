"""Trees of arrays as text: `( a b )` for tuples, `[ a b ]` for lists, `{ k=v }` for dicts, and NumPy's own for arrays."""

from collections.abc import Sequence

import numpy as np


_WIDTH = 100


def layout(value: object, threshold: int | None, indent: int = 0) -> str:
    """`value` on one line if it has room there, or else each of its parts on a line of its own.

    **Arguments:**

    - `threshold`: the number of elements above which NumPy leaves out the middle of an array. `None` for NumPy's own.
    """
    if isinstance(value, np.ndarray):
        return np.array2string(value, threshold=threshold)
    if isinstance(value, tuple):
        return _enclose("( ", " )", [("", part) for part in value], threshold, indent)
    if isinstance(value, list):
        return _enclose("[ ", " ]", [("", part) for part in value], threshold, indent)
    if isinstance(value, dict):
        parts = [(f"{key}=", value[key]) for key in sorted(value)]
        return _enclose("{ ", " }", parts, threshold, indent)
    return str(value)


def _enclose(left: str, right: str, parts: Sequence[tuple[str, object]], threshold: int | None, indent: int) -> str:
    texts = [label + layout(part, threshold, indent + 2) for label, part in parts]
    line = left + " ".join(texts) + right
    if indent + len(line) <= _WIDTH:
        return line
    return left + ("\n" + " " * (indent + 2)).join(texts) + right
