"""The static options of a call."""

from collections.abc import Mapping
from typing import Any


class Options:
    """Keyword options, hashable. Values that are equal but not the same, `1` and `True`, or `0.0` and `-0.0`, are two. Mappings
    are copied."""

    def __init__(self, values: Mapping[str, object], who: str):
        self.values: dict[str, Any] = {name: _frozen(value) for name, value in sorted(values.items())}
        self._key = tuple((name, _key(value)) for name, value in self.values.items())
        try:
            self._hash = hash(self._key)
        except TypeError:
            wrong = next(name for name, value in self.values.items() if _unhashable(value))
            raise TypeError(
                f"{who}: expected the option {wrong} to be static and hashable; got {type(self.values[wrong]).__name__}. "
                "Arrays are passed by position, and constants as tuples of numbers."
            ) from None

    def __reduce__(self) -> tuple[Any, ...]:
        return Options, (self.values, "")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Options) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.values.items())


def are_same(first: object, second: object) -> bool:
    """True if two values of an option are the same, or are arrays, of which nobody can tell."""
    try:
        return _key(first) == _key(second)
    except ValueError:
        return True


def _frozen(value: object) -> Any:
    return {name: _frozen(item) for name, item in value.items()} if isinstance(value, Mapping) else value


def _key(value: object) -> Any:
    if isinstance(value, dict):
        return dict, tuple((name, _key(item)) for name, item in sorted(value.items(), key=lambda item: str(item[0])))
    if type(value) in (float, complex):  # its text tells all of it, and of NaN, which is not equal to itself
        return type(value), repr(value)
    return type(value), repr(value), value


def _unhashable(value: object) -> bool:
    try:
        hash(_key(value))
    except TypeError:
        return True
    return False
