"""When two callables are the same: then they share programs."""

import types
from collections.abc import Callable

from ._own_callable import OwnCallable


class _SameObject:
    """Compares by `is`."""

    def __init__(self, value: object):
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameObject) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def identity(callback: Callable[..., object]) -> object:
    """Hashable, and equal for callables that do the same.

    Those are the same function; the same method of the same object; and objects that are equal *and* look equal, such as
    two instances of a frozen dataclass. Equality alone is not enough: `0.0 == -0.0` and `5 == 5.0 == True`.
    """
    if isinstance(callback, OwnCallable):
        return callback._identity()
    if isinstance(callback, types.FunctionType | types.BuiltinFunctionType | types.MethodType):
        return callback
    owner, function = getattr(callback, "__self__", None), getattr(callback, "__func__", None)
    if owner is not None and isinstance(function, types.FunctionType):
        return _SameObject(owner), function  # equinox makes a new bound method, without a hash, at each access
    if type(callback).__eq__ is object.__eq__:
        return _SameObject(callback)
    try:
        hash(callback)
        return type(callback), callback, repr(callback)
    except Exception:  # a Module that holds arrays, or whatever a user's method raises
        return _SameObject(callback)
