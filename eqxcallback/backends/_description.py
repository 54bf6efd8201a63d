"""Text that describes a kernel: the same in each process, and another one for a kernel that does something else."""

import dataclasses
import functools
import hashlib
import os
import re
import types
from typing import Any

from ..kernel import ImageKernel, Kernel
from ._source import read_image, read_source


def description(kernel: Kernel, who: str) -> str:
    """Describe a kernel by everything that it is made of: texts, files, and the code of its functions."""
    text = repr(_text(kernel, who, frozenset()))
    return f"{who} {hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def _text(value: Any, who: str, seen: frozenset[int]) -> Any:
    if id(value) in seen:
        return "..."
    seen |= {id(value)}

    def of(item: object) -> Any:
        return _text(item, who, seen)

    if isinstance(value, types.FunctionType):
        value = _without_checks(value)
        cells = tuple(cell.cell_contents for cell in value.__closure__ or ())
        named = {name: value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__}
        parts = value.__defaults__, value.__kwdefaults__, cells, named
        return value.__qualname__, _code(value.__code__), of(parts)
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if hasattr(value, "cache_key"):  # a Triton function: its source, and that of all it calls
        return value.cache_key
    if isinstance(value, ImageKernel):
        value = dataclasses.replace(value, image=read_image(value.image, who))
    if isinstance(value, bytes):
        return hashlib.blake2b(value, digest_size=16).hexdigest()
    if isinstance(value, os.PathLike):
        return read_source(value, who)
    if isinstance(value, dict):
        return [(name, of(item)) for name, item in value.items()]
    if isinstance(value, tuple | list):
        return [of(item) for item in value]
    if isinstance(value, functools.partial):
        return of((value.func, value.args, value.keywords))
    if dataclasses.is_dataclass(value):
        return [of(getattr(value, field.name)) for field in dataclasses.fields(value)]
    wrapped = getattr(value, "__wrapped__", None)
    if wrapped is not None:  # what JAX makes of a function: with its rules, if it has some
        rules = [item for item in vars(value).values() if isinstance(item, types.FunctionType)]
        return type(value).__qualname__, of(wrapped), of(rules)
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))


def _without_checks(function: Any) -> Any:
    """The function in jaxtyping's wrapper, which checks annotations. The wrapper would bring half of Python into the text."""
    while hasattr(function, "__wrapped__") and function.__globals__["__name__"].partition(".")[0] == "jaxtyping":
        function = function.__wrapped__
    return function


def _names(code: types.CodeType) -> list[str]:
    """Return the names that a function and the functions in it may look up."""
    inner = [name for const in code.co_consts if isinstance(const, types.CodeType) for name in _names(const)]
    return sorted({*code.co_names, *inner})


def _code(code: types.CodeType) -> tuple[Any, ...]:
    constants = [_code(const) if isinstance(const, types.CodeType) else repr(const) for const in code.co_consts]
    return code.co_code.hex(), code.co_names, constants
