"""Find mistakes in the class of a layer as soon as it is written: nothing else would report them."""

import difflib
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, ClassVar, get_origin

from ..kernel import as_tuple
from ._declarations import METHODS, LayerClass, method


_CLOSE = 0.83  # "kernal" is so close to "kernel"


def check_class(cls: type, base: type) -> None:
    """Raise `TypeError` for a name that is almost a declaration of `base`, and for a `__call__` that hides the kernel."""
    for name, meant in _misspelt(cls, base):
        raise TypeError(
            f"{cls.__qualname__}: expected {meant!r}; got {name!r}, which declares nothing. Correct it, or begin what is yours "
            f"with an underscore, _{name}."
        )
    call = method(cls, "__call__")
    if _has_kernel(cls) and call is not method(base, "__call__") and not _reaches_call(call):
        raise TypeError(
            f"{cls.__qualname__}: expected no __call__ beside a kernel, which calls of a layer run; got one that hides it. Give "
            "it another name, or to a Module that has the layer as a field, or call super().__call__(...) in it."
        )


def _misspelt(cls: type, base: type) -> Iterator[tuple[str, str]]:
    options = [name for name in vars(base) if not name.startswith("_") and name not in METHODS]
    known = {*options, *METHODS}
    kernels = vars(cls).get("kernels")
    named = {kernel for many in kernels.values() for kernel in as_tuple(many)} if isinstance(kernels, dict) else ()
    for name, value in vars(cls).items():
        if name.startswith("_") or name in known or name in named or _is_field(cls, name):
            continue
        # A name that goes on after the nearest one, such as `kernel2` or `batched`, is a helper's; a plural is a mistake.
        nearest = difflib.get_close_matches(name, known, 1, _CLOSE)
        if nearest and name.startswith(nearest[0]) and name != f"{nearest[0]}s":
            continue
        is_function = isinstance(getattr(value, "method", value), FunctionType)  # Equinox wraps methods
        for meant in difflib.get_close_matches(name, METHODS if is_function else options, 1, _CLOSE):
            yield name, meant


def _is_field(cls: type, name: str) -> bool:
    """True if dataclasses see a field: annotated, and not as a `ClassVar`."""
    annotation = inspect.get_annotations(cls).get(name)
    if isinstance(annotation, str):
        return "ClassVar" not in annotation
    return annotation is not None and ClassVar not in (annotation, get_origin(annotation))


def _has_kernel(cls: LayerClass) -> bool:
    return cls.kernels is not None or any("kernel" in vars(base) for base in cls.__mro__)


def _reaches_call(function: Any) -> bool:
    """True if a `__call__` looks up another one, as `super().__call__` does. A function without code may do anything."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is None or _names_call(code)


def _names_call(code: CodeType) -> bool:
    return "__call__" in code.co_names or any(isinstance(c, CodeType) and _names_call(c) for c in code.co_consts)
