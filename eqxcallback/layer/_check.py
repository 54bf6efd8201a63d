"""Check that the declarations in the class of a layer make sense."""

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from inspect import Parameter
from typing import Any

from .. import xla
from ..core import check_aliases
from ..kernel import JaxKernel, Kernel, PythonKernel, as_tuple
from ..transform import METHODS, REFERENCE, why_no_threads
from . import _declarations as declarations
from ._declarations import LayerClass, kernels_of, method, overrides_kernels, signature_of


ON_ERROR = ("raise", "poison")

Fault = tuple[type[Exception], str]


def check(cls: LayerClass) -> None:
    """Raise `TypeError` or `ValueError`, naming the layer, what was expected, and what it declares."""
    for faults in (
        _faults_of_options,
        _faults_of_methods,
        _faults_of_kernels,
        _faults_of_backward_kernels,
        _faults_of_threads,
        _faults_of_signatures,
        _faults_of_aliases,
    ):
        for kind, text in faults(cls):
            raise kind(f"{cls.__qualname__}: {text}")


def _faults_of_options(cls: LayerClass) -> Iterator[Fault]:
    if cls.vmap_method not in METHODS:
        yield ValueError, f"expected vmap_method to be one of {METHODS}; got {cls.vmap_method!r}."
    if cls.vmap_method == REFERENCE and method(cls, "reference") is None:
        yield ValueError, f'expected a reference for vmap_method="{REFERENCE}"; there is none. Define `reference`.'
    if cls.on_error not in ON_ERROR:
        yield ValueError, f"expected on_error to be one of {ON_ERROR}; got {cls.on_error!r}."
    for name in ("command_buffer_compatible", "has_side_effect"):
        value = getattr(cls, name)
        if not isinstance(value, bool):
            yield TypeError, f"expected {name} to be True or False; got {value!r} of type {type(value).__name__}."
    if cls.sharding is not None and not isinstance(cls.sharding, str):
        yield TypeError, f"expected sharding to be a rule such as '... d, d -> ... d'; got {cls.sharding!r}."


def _faults_of_methods(cls: LayerClass) -> Iterator[Fault]:
    for name in declarations.METHODS:
        attribute = method(cls, name)
        if attribute is not None and not callable(attribute):
            yield TypeError, f"expected {name} to be a method; got {attribute!r} of type {type(attribute).__name__}."
    if method(cls, "residual_type") is not None and method(cls, "backward") is None and not cls.backward_kernels:
        yield TypeError, "residual_type says what the kernel keeps for `backward`, but there is none. Define it."


def _faults_of_kernels(cls: LayerClass) -> Iterator[Fault]:
    declared = cls.kernels
    if declared is not None and not isinstance(declared, Mapping):
        yield TypeError, f"expected kernels to be a mapping from platforms to kernels; got {type(declared).__name__}."
    if declared is not None and not overrides_kernels(cls):
        yield from _faults_of_mapping(cls, declared)
    if not kernels_of(cls) and method(cls, "reference") is None:
        yield TypeError, "there is no kernel. Define `kernel(self, ctx, out, ...)`, or `kernels`."
    if method(cls, "reference") is None and not cls._has_own_out_type():
        yield TypeError, "nothing says what it returns. Define `out_type` or `reference`."


def _faults_of_backward_kernels(cls: LayerClass) -> Iterator[Fault]:
    declared = cls.backward_kernels
    if not isinstance(declared, Mapping):
        yield TypeError, f"expected backward_kernels to be a mapping; got {type(declared).__name__}."
    for platform, kernel in (
        (platform, candidate) for platform, kernels in declared.items() for candidate in as_tuple(kernels)
    ):
        entry = f"backward_kernels[{platform!r}]"
        if platform not in kernels_of(cls):
            yield (
                ValueError,
                f"{entry} is for a platform without a kernel forward; there are {', '.join(kernels_of(cls))}.",
            )
        if not isinstance(kernel, Kernel) or isinstance(kernel, PythonKernel):
            yield (
                TypeError,
                f"expected {entry} to be a kernel that is not Python's; got {kernel!r}. Define `backward` for that.",
            )
        elif kernel.out_type is not None or kernel.aliases:
            yield TypeError, f"{entry} has an out_type or aliases; gradients have the types of their arrays, and none."
        elif cls.on_error == "poison":
            yield ValueError, f"on_error='poison' is for Python kernels; {entry} is {kernel.name}, which is none."


def _faults_of_threads(cls: LayerClass) -> Iterator[Fault]:
    if cls.vmap_method != "threads":
        return
    backward = [("any platform", function)] if (function := method(cls, "backward")) is not None else []
    every = [(platform, kernel) for platform, kernels in kernels_of(cls).items() for kernel in kernels]
    for platform, kernel in [*every, *backward]:
        if (reason := why_no_threads(platform, kernel)) is not None:
            yield ValueError, reason


def _faults_of_mapping(cls: LayerClass, declared: Mapping[Any, Any]) -> Iterator[Fault]:
    owner = next(base for base in cls.__mro__ if "kernels" in vars(base))
    every = [(platform, kernel) for platform, kernels in declared.items() for kernel in as_tuple(kernels)]
    if "kernel" in vars(owner) and "kernel" not in [kernel for _, kernel in every]:
        yield (
            TypeError,
            "there are `kernel` and `kernels`, which takes its place. Define one, or name 'kernel' in kernels.",
        )
    for platform, kernel in every:
        entry = f"kernels[{platform!r}]"
        if platform not in xla.PLATFORMS:
            yield ValueError, f"expected the keys of kernels to be of {xla.PLATFORMS}; got {platform!r}."
        if isinstance(kernel, str) and method(cls, kernel) is None:
            yield ValueError, f"{entry} is {kernel!r}, which is not a method of the layer."
        if not isinstance(kernel, str | Kernel) and not callable(kernel):
            yield TypeError, f"expected {entry} to be a kernel or the name of a method; got {kernel!r}."
        if isinstance(kernel, Kernel) and kernel.out_type is not None:
            yield TypeError, f"{entry} has an out_type; expected it to be defined by the layer."
        if isinstance(kernel, Kernel) and not isinstance(kernel, PythonKernel):
            if cls.on_error == "poison":
                yield ValueError, f"on_error='poison' is for Python kernels; {entry} is {kernel.name}, which is none."
        elif platform not in xla.PYTHON_PLATFORMS:
            yield ValueError, f"{entry} is a Python kernel; expected it for one of {xla.PYTHON_PLATFORMS}."
        if isinstance(kernel, JaxKernel):
            if kernel.differentiable is not None:
                yield (
                    TypeError,
                    f"{entry} has a `differentiable` function, which is for an Op. Define `jvp` or `reference`.",
                )
            yield from _takes(kernel.function, ("self",), f"the function of {entry}")
        if isinstance(kernel, PythonKernel):
            yield from _takes(kernel.body, ("ctx", "out", "self"), f"the body of {entry}")
            yield from _misplaces(cls, kernel.body, ("ctx", "out", "self"), f"the body of {entry}")


def _faults_of_signatures(cls: LayerClass) -> Iterator[Fault]:
    for platform, kernel in ((platform, kernel) for platform, kernels in kernels_of(cls).items() for kernel in kernels):
        if not isinstance(kernel, Kernel):
            yield from _takes(kernel, ("self", "ctx", "out"), f"the kernel for {platform}")
            yield from _misplaces(cls, kernel, ("self", "ctx", "out"), f"the kernel for {platform}")
            yield from _agrees(cls, kernel, 3, f"the kernel for {platform}")
    for name in ("reference", "residual_type", *(("out_type",) if cls._has_own_out_type() else ())):
        if (function := method(cls, name)) is not None:
            yield from _agrees(cls, function, 1, name)
    for name, parameters in (
        ("backward", ("self", "ctx", "grads", "args", "out", "cotangents")),
        ("jvp", ("self", "args", "tangents")),
        ("batch", ("self", "axis_size", "in_axes", "args")),
    ):
        if (function := method(cls, name)) is not None:
            yield from _takes(function, parameters, name, exactly=True)


def _faults_of_aliases(cls: LayerClass) -> Iterator[Fault]:
    aliases = check_aliases(cls.input_output_aliases, cls.__qualname__)
    parameters = signature_of(cls).parameters
    fields = [f"self.{field.name}" for field in dataclasses.fields(cls)]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for key in aliases:
        if (
            not isinstance(key, str)
            or key in parameters
            or key in fields
            or (takes_any and not key.startswith("self."))
        ):
            continue
        what = "a field of the layer" if key.startswith("self.") else "a parameter of the kernel"
        names = ", ".join(fields if key.startswith("self.") else parameters) or "none"
        remedy = f" It is an array of the layer: write 'self.{key}'." if f"self.{key}" in fields else ""
        yield ValueError, f"input_output_aliases has the input {key!r}, which is not {what} ({names}).{remedy}"


def _takes(function: Any, names: tuple[str, ...], what: str, exactly: bool = False) -> Iterator[Fault]:
    expected = f"{what} to take ({', '.join(names)}{'' if exactly else ', ...'})"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        yield TypeError, f"expected {expected}; got {function!r}, which has no signature."
        return
    try:
        (signature.bind if exactly else signature.bind_partial)(*names)
    except TypeError as error:
        yield TypeError, f"expected {expected}; its signature is {signature} ({error})."


def _misplaces(cls: LayerClass, function: Any, names: tuple[str, ...], what: str) -> Iterator[Fault]:
    """An argument of the layer, or `ctx` or `out`, in another place than the one in which a kernel gets it."""
    others = [declared for name in ("reference", "out_type") if (declared := method(cls, name)) is not None]
    taken = [list(inspect.signature(other).parameters)[1:] for other in others]
    arguments = {name for parameters in taken for name in parameters}
    signature = inspect.signature(function)
    given = list(signature.parameters)
    takes_any = any(parameter.kind is Parameter.VAR_POSITIONAL for parameter in signature.parameters.values())
    moved = [name for name in ("ctx", "out") if name in given and given.index(name) != names.index(name)]
    lacks = any(len(given) - len(names) < len(parameters) for parameters in taken)
    if set(moved) - arguments or (lacks and not takes_any and arguments.intersection(given[: len(names)])):
        missing = ", ".join(name for name in names if name not in given)
        problem = f"{missing} is missing" if missing else "they come in another order"
        yield TypeError, f"expected {what} to take ({', '.join(names)}, ...); its signature is {signature}: {problem}."


def _agrees(cls: type, function: Any, skipped: int, what: str) -> Iterator[Fault]:
    """Check that a function takes all arguments of a call, by position where they have one."""
    parameters = list(signature_of(cls).parameters.values())
    if any(p.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) for p in parameters):
        return
    positional = [p.name for p in parameters if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    keywords = [p.name for p in parameters if p.kind is Parameter.KEYWORD_ONLY]
    signature = inspect.signature(function)
    given = [p.name for p in signature.parameters.values()][skipped : skipped + len(positional)]
    expected = f"expected {what} to take ({', '.join([*positional, *keywords])}), as calls of the layer do"
    try:
        signature.bind(*[None] * (skipped + len(positional)), **dict.fromkeys(keywords))
    except TypeError as error:
        yield TypeError, f"{expected}; its signature is {signature} ({error})."
    if given != positional and set(given) == set(positional):
        yield TypeError, f"{expected}; its signature is {signature}, in another order."
