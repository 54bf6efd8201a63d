"""The declarations of a class stay as they were when it was first used: they are read once, and calls and programs are kept."""

import dataclasses
import inspect
import weakref
from collections.abc import Mapping
from typing import Any, dataclass_transform

import equinox as eqx

from .. import backends
from ..kernel import Frozen, as_tuple
from ._declarations import METHODS


_used: weakref.WeakSet[type] = weakref.WeakSet()

# Equinox keeps the class private, and a metaclass has to be derived from it.
_ModuleMeta: Any = type(eqx.Module)


@dataclass_transform(field_specifiers=(dataclasses.field, eqx.field))  # as Equinox's is, which type checkers cannot see
class LayerMeta(_ModuleMeta):
    """The type of a layer's class. A declaration that is changed later would be ignored, so that is an error."""

    def __setattr__(self, name: str, value: object) -> None:
        if not _is_fixed(self, name):
            super().__setattr__(name, value)
        elif not _is_declared(self, name, value):
            raise _error(self, name)

    def __delattr__(self, name: str) -> None:
        if _is_fixed(self, name):
            raise _error(self, name)
        super().__delattr__(name)


def fix(cls: type) -> None:
    """Fix what a class and its bases declare, and the mappings in it."""
    bases = [base for base in cls.__mro__ if isinstance(base, LayerMeta) and base not in _used]
    for base in bases:
        declared = {name: value for name, value in vars(base).items() if _is_declaration(base, name)}
        for name, value in declared.items():
            if isinstance(value, Mapping):
                items = {key: tuple(item) if isinstance(item, list) else item for key, item in value.items()}
                setattr(base, name, Frozen(items, f"{base.__qualname__}.{name}"))
    _used.update(bases)


def _is_fixed(cls: Any, name: str) -> bool:
    return cls in _used and _is_declaration(cls, name)


def _is_declared(cls: Any, name: str, value: object) -> bool:
    """True for a copy too: cloudpickle sets copies of all that a class has, when another process sends back a layer of it."""
    before = inspect.getattr_static(cls, name, None)
    if value is before:
        return True
    texts = [backends.description(getattr(of, "method", of), name) for of in (before, value)]  # Equinox wraps methods
    return texts[0] == texts[1]


def _error(cls: type, name: str) -> AttributeError:
    return AttributeError(
        f"{cls.__qualname__}: expected {name} to stay as it was when the first layer was made of the class, which is when it is "
        "read; got another one. Define a subclass that has it, or the class anew."
    )


def _is_declaration(cls: Any, name: str) -> bool:
    root = next(base for base in reversed(cls.__mro__) if isinstance(base, LayerMeta))
    kernels = cls.kernels if isinstance(cls.kernels, dict) else {}
    named = [kernel for many in kernels.values() for kernel in as_tuple(many)]
    return name in METHODS or name in inspect.get_annotations(root) or name in named
