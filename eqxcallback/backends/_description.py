"""Text that describes a kernel: the same in each process, and another one for a kernel that does something else."""

import dataclasses
import functools
import hashlib
import os
import re
import types
import weakref
from typing import Any

from ..kernel import CKernel, CudaKernel, ImageKernel, NativeKernel
from ._source import read_image, read_source


def description(declared: object, who: str) -> str:
    """Describe a kernel, or what else a class declares, by all that it is made of: texts, files, and the code of functions."""
    text = repr(_text(declared, who, frozenset()))
    return f"{who} {hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


# What a kernel's function is made of, as it was when it was described first: its calls may change what it refers to, as one
# that counts them does.
_functions: weakref.WeakKeyDictionary[types.FunctionType, Any] = weakref.WeakKeyDictionary()


def _text(value: Any, who: str, seen: frozenset[int], *, in_function: bool = False) -> Any:
    if id(value) in seen:
        return "..."
    seen |= {id(value)}

    def of(item: object) -> Any:
        return _text(item, who, seen, in_function=in_function)

    def of_function(function: Any) -> Any:
        cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
        named = {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}
        parts = function.__defaults__, function.__kwdefaults__, cells, named
        return function.__qualname__, _code(function.__code__), _text(parts, who, seen, in_function=True)

    if isinstance(value, types.FunctionType):
        value = _without_checks(value)
        if in_function:
            return of_function(value)
        if value not in _functions:
            _functions[value] = of_function(value)
        return _functions[value]
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if hasattr(value, "cache_key"):  # a Triton function: its source, and that of all it calls
        return value.cache_key
    if isinstance(value, ImageKernel):
        value = dataclasses.replace(value, image=read_image(value.image, who))
    if isinstance(value, CKernel | CudaKernel | NativeKernel) and value.source is not None:
        value = dataclasses.replace(value, source=read_source(value.source, who, value.options)[0])
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
