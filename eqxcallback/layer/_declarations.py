"""Read the declarations in the class of a layer."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter
from typing import Any, TypeAlias

from .. import xla
from ..core import PyTree
from ..kernel import Kernel, as_tuple


# What a layer may define beside its attributes.
METHODS = ("kernel", "reference", "out_type", "residual_type", "backward", "jvp", "batch")

# A subclass of `Layer`, whose attributes are checked before they are what `Layer` says.
LayerClass: TypeAlias = Any


def method(cls: type, name: str) -> Callable[..., Any] | None:
    """The function that a class has under `name`, unbound; Equinox wraps methods when they are looked up."""
    for base in cls.__mro__:
        if name in vars(base):
            value = vars(base)[name]
            if isinstance(value, staticmethod):
                raise TypeError(f"{cls.__qualname__}: expected {name} to be a method; got a staticmethod.")
            return getattr(value, "method", value)  # Equinox wraps methods
    return None


def kernels_of(cls: type) -> Mapping[str, tuple[Any, ...]]:
    """`{platform: kernels or functions}`, in order of preference."""
    declared = getattr(cls, "kernels", None)
    if declared is not None and not overrides_kernels(cls):
        return {
            platform: tuple(method(cls, kernel) if isinstance(kernel, str) else kernel for kernel in as_tuple(kernels))
            for platform, kernels in declared.items()
        }
    kernel = method(cls, "kernel")
    return {} if kernel is None else dict.fromkeys(xla.PYTHON_PLATFORMS, (kernel,))


def overrides_kernels(cls: type) -> bool:
    """True if a subclass defines `kernel` in place of the `kernels` of a base."""
    for base in cls.__mro__:
        if "kernels" in vars(base):
            return False
        if "kernel" in vars(base):
            return True
    return False


def signature_of(cls: type) -> inspect.Signature:
    """Return the signature of a call: the parameters of the kernel after `out`, or of the reference after `self`."""
    for kernels in kernels_of(cls).values():
        for kernel in kernels:
            if not isinstance(kernel, Kernel):
                return _without(kernel, 3)
    for name in ("reference", "out_type"):
        function = method(cls, name)
        if function is not None:
            return _without(function, 1)
    raise TypeError(f"{cls.__qualname__}: there is neither a kernel nor a reference.")


def takes_key(signature: inspect.Signature) -> bool:
    """True if a `key=` is an argument of the call. Else it is dropped: `equinox.nn.Sequential` gives every layer one."""
    return any(p.name == "key" or p.kind is p.VAR_KEYWORD for p in signature.parameters.values())


def _without(function: Callable[..., object], count: int) -> inspect.Signature:
    """The signature without the first parameters, of which `*args` may stand for all."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    while count and parameters and parameters[0].kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
        del parameters[0]
        count -= 1
    return signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)


def in_order(cls: type, keywords: Iterable[str]) -> tuple[str, ...]:
    """Keyword arguments in the order of the signature. In PyTrees they are sorted."""
    keywords = list(keywords)
    named = [name for name in signature_of(cls).parameters if name in keywords]
    return (*named, *sorted(set(keywords) - set(named)))


def names_of(cls: type, num_positional: int) -> list[str]:
    """The parameter that each positional argument belongs to."""
    names = []
    for parameter in signature_of(cls).parameters.values():
        if parameter.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
        elif parameter.kind is Parameter.VAR_POSITIONAL:
            names.extend([parameter.name] * (num_positional - len(names)))
    return names[:num_positional]


def bind(
    signature: inspect.Signature, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """The arguments in the order of the signature, defaults filled in."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args, bound.kwargs


def is_positional(signature: inspect.Signature) -> int | None:
    """Return the number of arguments of a call if all of them are always given by position, else `None`."""
    parameters = signature.parameters.values()
    plain = all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    return len(parameters) if plain else None
