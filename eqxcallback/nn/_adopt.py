"""A Module of one class with what one of another class holds."""

import dataclasses
from typing import Any, TypeVar


_Layer = TypeVar("_Layer")


def adopt(kind: type[_Layer], layer: Any, **fields: object) -> _Layer:
    """A `kind` with the fields of `layer`, the very same arrays, and with `fields`; what both lack has its default. No
    constructor runs: there is no key, and arrays may be traced or missing."""
    new: Any = object.__new__(kind)
    for field in dataclasses.fields(new):
        value = fields.get(field.name, getattr(layer, field.name, field.default))
        if value is not dataclasses.MISSING:
            object.__setattr__(new, field.name, value)
    return new
