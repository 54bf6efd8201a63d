"""The static options of a call."""

from collections.abc import Mapping
from typing import Any


class Options:
    """Keyword options, hashable. Values that are equal but not the same, `1` and `True`, or `0.0` and `-0.0`, are two."""

    def __init__(self, values: Mapping[str, Any], who: str):
        self.values = dict(sorted(values.items()))
        self._key = tuple((name, type(value), repr(value), value) for name, value in self.values.items())
        try:
            self._hash = hash(self._key)
        except TypeError:
            wrong = next(name for name, value in self.values.items() if _unhashable(value))
            raise TypeError(
                f"{who}: expected the option {wrong} to be static and hashable; got {type(self.values[wrong]).__name__}. "
                "Arrays are passed by position."
            ) from None

    def __reduce__(self) -> tuple[Any, ...]:
        return Options, (self.values, "")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Options) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.values.items())


def _unhashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return True
    return False
