"""A table of names: those of a file's tensors, and the paths of a Module's arrays."""

import re
from collections.abc import Mapping


class Table:
    """Looks up both ways. In both, `*` stands for a part of a name between dots, and the first row that fits counts.

    **Arguments:**

    - `names`: for patterns of names, patterns of paths, with as many `*`.
    """

    def __init__(self, names: Mapping[str, str]):
        for name, path in names.items():
            if name.count("*") != path.count("*"):
                raise ValueError(f"names: expected as many * on both sides; got {name!r} and {path!r}.")
        self._paths = [(_compiled(name), path) for name, path in names.items()]
        self._names = [(_compiled(path), name) for name, path in names.items()]

    def path(self, name: str) -> str | None:
        """The path for a name, if the table has it."""
        return _look_up(self._paths, name)

    def name(self, path: str) -> str | None:
        """The name for a path, if the table has it."""
        return _look_up(self._names, path)


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile("([^.]+)".join(map(re.escape, pattern.split("*"))))


def _look_up(rows: list[tuple[re.Pattern[str], str]], text: str) -> str | None:
    for pattern, target in rows:
        if match := pattern.fullmatch(text):
            parts = target.split("*")
            return parts[0] + "".join(group + part for group, part in zip(match.groups(), parts[1:], strict=True))
    return None
