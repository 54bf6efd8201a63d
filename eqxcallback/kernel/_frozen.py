"""Mappings that stay as they are."""

from collections.abc import Mapping
from typing import Any, NoReturn


class Frozen(dict[Any, Any]):
    """A copy of a mapping that was declared: programs are kept by it, so it cannot change. It can be copied and pickled, and
    equals other mappings of the same items.

    **Arguments:** `who`: what begins an error.
    """

    def __init__(self, declared: Mapping[Any, Any], who: str):
        super().__init__(declared)
        self._who = who

    def _refuse(self: Any, *_: object, **__: object) -> NoReturn:
        names = ", ".join(map(repr, self)) or "nothing"
        raise TypeError(
            f"{self._who}: expected the mapping to stay as it was declared, of {names}; got a change of it. Give another one to "
            "dataclasses.replace, or declare it in a subclass of the layer."
        )

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self), self._who)
