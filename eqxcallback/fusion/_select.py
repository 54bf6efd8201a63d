"""Which layers of a model a caller means."""

from collections.abc import Callable, Sequence
from typing import Any


Which = type | str | Callable[[str, Any], bool]
Selection = Callable[[str, Any, tuple[Any, ...]], bool]


def selection(which: Which | Sequence[Which] | None, name: str) -> Selection:
    """A function of a layer's path, the layer, and the nodes that it is in."""
    given = () if which is None else which if isinstance(which, Sequence) and not isinstance(which, str) else (which,)
    for each in given:
        if not isinstance(each, type | str) and not callable(each):
            raise TypeError(
                f"fuse: expected {name} to be classes, paths or functions of path and layer; got {each!r} of type "
                f"{type(each).__name__}."
            )
    return lambda path, layer, above: any(_is_of(each, path, layer, above) for each in given)


def _is_of(which: Which, path: str, layer: Any, above: tuple[Any, ...]) -> bool:
    if isinstance(which, type):
        return any(isinstance(node, which) for node in (*above, layer))
    if isinstance(which, str):
        return path.startswith(which) and path[len(which) :][:1] in ("", ".", "[")
    return bool(which(path, layer))
