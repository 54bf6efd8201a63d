"""The contract of a kernel: what every kind declares."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias


# A map from operands, by position or name, to the results that take their memory. A Mapping's keys are invariant: hence three.
Aliases: TypeAlias = Mapping[int, int | str] | Mapping[str, int | str] | Mapping[int | str, int | str]

# By name, what users write for each: a dtype, a `TensorMap`, or `(dtype, function)`. What is read is always a pair, as
# `scalars` in _checks.py makes it, and a field has one annotation.
Scalars: TypeAlias = Mapping[str, Any]


def anything(types: object, **options: object) -> bool:
    """Supports every call."""
    del types, options
    return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelContract:
    """The first kernel of a platform that supports a call runs, else the reference.

    **Attributes:**

    - `supports`: a function `(types, **options)`: `True`, or in words why not, as a phrase that follows the kernel's name.
        `types` is a named tuple of the op's arguments, or of the layer and its arguments, as `jax.ShapeDtypeStruct`s that have
        the shapes that the kernel would see, and `None` for what is absent. By default the kernel takes every call.
    - `only_if_chosen`: whether the kernel runs only where `implementation=` names its kind, and never by default.
    """

    backend: ClassVar[str]

    supports: Callable[..., bool | str] = anything
    only_if_chosen: bool = False


def as_tuple(kernels: Any) -> tuple[Any, ...]:
    """One kernel, or several in order of preference."""
    return tuple(kernels) if isinstance(kernels, list | tuple) else (kernels,)
