"""Texts of static values, by which an exported program tells the one that it was made with from another."""

import dataclasses
import enum
import functools
import hashlib
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..core import Memo, callable_name, type_text


_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), np.dtype, enum.Enum)

# A text stands in a key and in errors, and an object may refer to many others: the rest of a long text is a hash.
_LONGEST = 400
# An object may refer to itself by way of objects that are made when they are asked for, such as bound methods.
_DEEPEST = 40


def static_text(value: object) -> str:
    """The same in each process for the same value, and another one for another value as far as Python shows what it holds."""
    return _Writer().text(value)


class _Writer:
    def __init__(self) -> None:
        # By their ids, which hold as long as the objects are kept. An object inside of itself is `...`.
        self._texts: dict[int, tuple[object, str]] = {}
        self._depth = 0

    def text(self, value: object) -> str:
        if isinstance(value, _PLAIN):
            return _short(repr(value))
        if id(value) in self._texts:
            return self._texts[id(value)][1]
        if self._depth == _DEEPEST:
            return "..."
        self._texts[id(value)] = value, "..."
        self._depth += 1
        text = _short(self._written(value))
        self._depth -= 1
        self._texts[id(value)] = value, text
        return text

    def _written(self, value: Any) -> str:
        if isinstance(value, tuple | list):
            return f"({self._all(value)})"
        if isinstance(value, set | frozenset):  # in an order that differs between processes
            return f"{{{', '.join(sorted(map(self.text, value)))}}}"
        if isinstance(value, Memo):
            return "..."
        if isinstance(value, Mapping):
            return f"{{{', '.join(f'{self.text(key)}: {self.text(item)}' for key, item in value.items())}}}"
        if isinstance(value, np.ndarray | np.generic | jax.Array):
            return self._of_array(value)
        if isinstance(value, type | types.ModuleType):
            return getattr(value, "__qualname__", value.__name__)
        if isinstance(value, functools.partial):
            return f"{self.text(value.func)} with {self.text((value.args, value.keywords))}"
        if callable(value) and _is_importable(value):
            return callable_name(value)
        if isinstance(value, types.FunctionType):
            return self._of_function(value)
        owner = getattr(value, "__self__", None)
        if callable(value) and owner is not None:
            function = getattr(value, "__func__", None)
            name = callable_name(value) if function is None else self.text(function)
            return name if isinstance(owner, types.ModuleType) else f"{name} of {self.text(owner)}"
        if dataclasses.is_dataclass(value):
            fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
            return f"{type(value).__qualname__} {self.text(fields)}"
        return self._of_object(value)

    def _all(self, values: Iterable[object]) -> str:
        return ", ".join(map(self.text, values))

    def _of_array(self, array: Any) -> str:
        name = type_text(array.dtype, array.shape)
        if isinstance(array, Tracer):
            return name
        if isinstance(array, jax.Array) and (array.is_deleted() or not array.is_fully_addressable):
            return name  # its numbers are not here
        if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
        array = np.ascontiguousarray(array)
        if array.dtype.hasobject:  # its bytes are addresses
            return f"{name} {self.text(array.tolist())}"
        return f"{name} {_digest(array.tobytes())}"

    def _of_function(self, function: types.FunctionType) -> str:
        """A function that was made by another one has its name in common with all that are made there, and `functools.wraps`
        gives it the name of a third. It is told by its code and by what it holds.
        """
        name, code = callable_name(function), function.__code__
        if "<" not in name + code.co_qualname:
            return name
        held = dict(zip(code.co_freevars, map(_content, function.__closure__ or ()), strict=True))
        defaults = (function.__defaults__ or (), function.__kwdefaults__ or {})
        return f"{name} of {self._of_code(code)} with {self.text((held, *defaults))}"

    def _of_code(self, code: types.CodeType) -> str:
        """Names and constants, to be read, and a hash of the rest. Another version of Python has another one, and is refused."""
        constants = [self._of_code(c) if isinstance(c, types.CodeType) else self.text(c) for c in code.co_consts]
        return f"({self._all((code.co_varnames, code.co_names))}, {', '.join(constants)}) {_digest(code.co_code)}"

    def _of_object(self, value: Any) -> str:
        wrapped = getattr(value, "__wrapped__", None)
        if wrapped is not None:
            name = self.text(wrapped)
            if isinstance(value, jax.stages.Wrapped):
                return name  # the rest is about compilation
        elif type(value).__repr__ is not object.__repr__:
            name = re.sub(" at 0x[0-9a-fA-F]+", "", repr(value))
        else:
            name = callable_name(value) if callable(value) else type(value).__qualname__
        copied = getattr(wrapped, "__dict__", {})  # by `functools.update_wrapper`
        held = {key: item for key, item in _attributes(value).items() if copied.get(key, copied) is not item}
        return f"{name} {self.text(held)}" if held else name


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}... {_digest(text.encode(errors='replace'))}"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _is_importable(value: Callable[..., object]) -> bool:
    """True if a name is enough: nothing else has it."""
    found: Any = sys.modules.get(str(getattr(value, "__module__", None)))
    for name in callable_name(value).split("."):
        found = getattr(found, name, None)
    return found is value


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return ...


def _attributes(value: object) -> dict[str, object]:
    """Its attributes, but for what it keeps so as not to compute it again: that comes as it is used."""
    names = list(getattr(value, "__dict__", ()))
    if type(value).__repr__ is object.__repr__:  # one of its own shows them
        slots = (getattr(kind, "__slots__", ()) for kind in type(value).__mro__)
        names += [name for of_kind in slots for name in ((of_kind,) if isinstance(of_kind, str) else of_kind)]
    return {
        name: getattr(value, name, None)
        for name in names
        if not name.startswith("__") and not isinstance(getattr(type(value), name, None), functools.cached_property)
    }
