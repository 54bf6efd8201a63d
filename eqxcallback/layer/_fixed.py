"""The declarations of a class stay as they were when it was first used: they are read once, and calls and programs are kept."""

import inspect
import weakref
from typing import Any

import equinox as eqx

from ..kernel import as_tuple
from ._declarations import METHODS


_used: weakref.WeakSet[type] = weakref.WeakSet()

# Equinox keeps the class private, and a metaclass has to be derived from it.
_ModuleMeta: Any = type(eqx.Module)


class LayerMeta(_ModuleMeta):
    """The type of a layer's class. A declaration that is changed later would be ignored, so that is an error."""

    def __setattr__(self, name: str, value: object) -> None:
        if value is not vars(self).get(name, ...):
            _check_unused(self, name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        _check_unused(self, name)
        super().__delattr__(name)


def fix(cls: type) -> None:
    """Fix what a class and its bases declare."""
    _used.update(base for base in cls.__mro__ if isinstance(base, LayerMeta))


def _check_unused(cls: Any, name: str) -> None:
    if cls in _used and _is_declaration(cls, name):
        raise AttributeError(
            f"{cls.__qualname__}: expected {name} to stay as it was when the first layer was made of the class, which is when "
            "it is read; got another one. Define a subclass that has it, or the class anew."
        )


def _is_declaration(cls: Any, name: str) -> bool:
    root = next(base for base in reversed(cls.__mro__) if isinstance(base, LayerMeta))
    kernels = cls.kernels if isinstance(cls.kernels, dict) else {}
    named = [kernel for many in kernels.values() for kernel in as_tuple(many)]
    return name in METHODS or name in inspect.get_annotations(root) or name in named
