"""What the class of a layer declares, and whether it makes sense."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import Parameter
from typing import Any

from .. import _aliases
from ..kernel import Kernel
from ..op import METHODS


# Where the Python lane runs.
PYTHON_PLATFORMS = ("cpu", "cuda")
PLATFORMS = ("cpu", "cuda", "rocm")
ON_ERROR = ("raise", "poison")


def method(cls: type, name: str) -> Callable[..., Any] | None:
    """The function that a class has under `name`, unbound; Equinox wraps methods when they are looked up."""
    for base in cls.__mro__:
        if name in vars(base):
            found = vars(base)[name]
            if isinstance(found, staticmethod):
                raise TypeError(f"{cls.__qualname__}: expected {name} to be a method; got a staticmethod.")
            return getattr(found, "method", found)  # of Equinox's wrapper
    return None


def kernels_of(cls: type) -> Mapping[str, Any]:
    """`{platform: kernel or function}`."""
    declared = getattr(cls, "kernels", None)
    if declared is not None:
        return {
            platform: method(cls, kernel) if isinstance(kernel, str) else kernel
            for platform, kernel in declared.items()
        }
    kernel = method(cls, "kernel")
    return {} if kernel is None else dict.fromkeys(PYTHON_PLATFORMS, kernel)


def signature_of(cls: type) -> inspect.Signature:
    """Of a call: what the kernel takes after `out`, or the reference after `self`."""
    for kernel in kernels_of(cls).values():
        if not isinstance(kernel, Kernel):
            return _without(kernel, 3)
    for name in ("reference", "out_type"):
        function = method(cls, name)
        if function is not None:
            return _without(function, 1)
    raise TypeError(f"{cls.__qualname__}: there is neither a kernel nor a reference.")


def _without(function: Callable[..., Any], count: int) -> inspect.Signature:
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


def check(cls: type, has_own_out_type: bool) -> None:
    """Raise `TypeError` or `ValueError`, naming the layer, what was expected, and what it declares."""
    who = cls.__qualname__
    for fault in _faults(cls, has_own_out_type):
        raise fault[0](f"{who}: {fault[1]}")


def _faults(cls: Any, has_own_out_type: bool) -> Iterator[tuple[type[Exception], str]]:
    if cls.vmap_method not in METHODS:
        yield ValueError, f"expected vmap_method to be one of {METHODS}; got {cls.vmap_method!r}."
    if cls.on_error not in ON_ERROR:
        yield ValueError, f"expected on_error to be one of {ON_ERROR}; got {cls.on_error!r}."
    for name in ("command_buffer_compatible", "has_side_effect"):
        value = getattr(cls, name)
        if not isinstance(value, bool):
            yield TypeError, f"expected {name} to be True or False; got {value!r} of type {type(value).__name__}."

    declared = getattr(cls, "kernels", None)
    if declared is not None and not isinstance(declared, Mapping):
        yield TypeError, f"expected kernels to be a mapping from platforms to kernels; got {type(declared).__name__}."
    for platform, kernel in (declared or {}).items():
        if platform not in PLATFORMS:
            yield ValueError, f"expected the keys of kernels to be of {PLATFORMS}; got {platform!r}."
        if isinstance(kernel, str):
            if method(cls, kernel) is None:
                yield ValueError, f"kernels[{platform!r}] is {kernel!r}, which is not a method of the layer."
        elif not isinstance(kernel, Kernel) and not callable(kernel):
            yield TypeError, f"expected kernels[{platform!r}] to be a kernel or the name of a method; got {kernel!r}."
    kernels = kernels_of(cls)
    if not kernels and method(cls, "reference") is None:
        yield TypeError, "there is no kernel. Define `kernel(self, ctx, out, ...)`, or `kernels`."
    for name, kernel in kernels.items():
        if not isinstance(kernel, Kernel):
            yield from _positional(kernel, ("self", "ctx", "out"), f"the kernel for {name}")
    if method(cls, "reference") is None and not has_own_out_type:
        yield TypeError, "nothing says what it returns. Define `out_type` or `reference`."
    backward = method(cls, "backward")
    if backward is not None:
        yield from _positional(backward, ("self", "ctx", "grads", "args", "out", "cotangents"), "backward", exact=True)
    elif method(cls, "residual_type") is not None:
        yield TypeError, "residual_type says what the kernel keeps for `backward`, but there is none. Define it."
    if method(cls, "jvp") is not None:
        yield from _positional(method(cls, "jvp"), ("self", "args", "tangents"), "jvp", exact=True)
    if method(cls, "batch") is not None:
        yield from _positional(method(cls, "batch"), ("self", "axis_size", "in_axes", "args"), "batch", exact=True)

    aliases = _aliases.check(cls.input_output_aliases, cls.__qualname__)
    parameters = signature_of(cls).parameters
    if aliases and any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for key in aliases:
        if isinstance(key, str) and key not in parameters and not key.startswith("self."):
            own = " The layer's own arrays are named `self.name`." if hasattr(cls, "__dataclass_fields__") else ""
            names = ", ".join(parameters) or "none"
            yield (
                ValueError,
                f"input_output_aliases has the input {key!r}, which is not a parameter of the kernel ({names}).{own}",
            )


def _positional(
    function: Any, names: tuple[str, ...], what: str, exact: bool = False
) -> Iterator[tuple[type[Exception], str]]:
    expected = f"{what} to take ({', '.join(names)}{'' if exact else ', ...'})"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        yield TypeError, f"expected {expected}; got {function!r}, which has no signature."
        return
    try:
        bind = signature.bind if exact else signature.bind_partial
        bind(*names)
    except TypeError as error:
        yield TypeError, f"expected {expected}; its signature is {signature} ({error})."
