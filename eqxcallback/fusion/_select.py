"""Select the layers of a model that a caller means."""

import re
from collections.abc import Callable, Iterable, Sequence

from ..core import PyTree
from ._walk import Place


Which = type | str | Callable[[str, PyTree], bool]


class Selection:
    """`only` or `exclude`, as it was given."""

    def __init__(self, which: Which | Sequence[Which], name: str):
        self._name = name
        self._given = which if isinstance(which, Sequence) and not isinstance(which, str) else (which,)
        for given in self._given:
            if not isinstance(given, type | str) and not callable(given):
                raise TypeError(
                    f"fuse: expected {name} to be classes, paths or functions of path and layer; got {given!r} of type "
                    f"{type(given).__name__}."
                )
        self._patterns = {path: _pattern(path) for path in self._given if isinstance(path, str)}
        self._matched = False

    def place_of(self, layer: PyTree, places: Sequence[Place]) -> Place | None:
        """The first of a layer's places that is meant."""
        for place in places:
            if any(self._is_of(given, place, layer) for given in self._given):
                self._matched = True
                return place
        return None

    def _is_of(self, which: Which, place: Place, layer: PyTree) -> bool:
        if isinstance(which, type):
            return any(isinstance(node, which) for node in (*place.above, layer))
        if isinstance(which, str):
            return self._patterns[which].match(place.path) is not None
        return bool(which(place.path, layer))

    def check_paths(self, paths: Iterable[str], layers: Sequence[str]) -> None:
        """A path that is not in the model is a mistake.

        **Arguments:**

        - `paths`: of all nodes.
        - `layers`: those of layers, for the error.
        """
        paths = list(paths)
        unknown = [given for given, pattern in self._patterns.items() if not any(map(pattern.match, paths))]
        if unknown:
            raise ValueError(
                f"fuse: expected {self._name} to have paths of the model, as the report has them; got {unknown[0]!r}, at which "
                f"there is nothing. {_some(layers)}"
            )

    def check_matched(self, layers: Sequence[str]) -> None:
        if not self._matched:
            raise ValueError(
                f"fuse: expected {self._name} to match a layer that has a fused one; got {self._name}={self._given!r}, which "
                f"matches none. {_some(layers)}"
            )


def _pattern(where: str) -> re.Pattern[str]:
    """Match a path that is `where`, in which `[*]` is any index, or is below it."""
    return re.compile(re.escape(where).replace(re.escape("[*]"), r"\[\d+\]") + r"(?=[.\[]|$)")


def _some(layers: Sequence[str]) -> str:
    if not layers:
        return "There are no layers in it."
    return f"There are layers at {', '.join(layers[:6])}{' and so on' if len(layers) > 6 else ''}."
