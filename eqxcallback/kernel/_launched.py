"""Fields that all kernels with a launch of their own have, and the notation of parameters."""

from collections.abc import Sequence
from typing import Any

from ._checks import check_function, freeze_workspaces, frozen_mapping, scalars
from ._launch import Launch


def freeze_launched(kernel: Any, kind: str) -> str:
    """Checks the fields that they share. Returns what begins an error."""
    if not isinstance(kernel.entry, str) and not callable(kernel.entry):
        raise TypeError(f"{kind}: expected entry to be the name of a function; got {kernel.entry!r}.")
    who = f"{kind}({kernel.entry})" if isinstance(kernel.entry, str) else kind
    launches = tuple(kernel.launch) if isinstance(kernel.launch, Sequence) else (kernel.launch,)
    if not launches or not all(isinstance(launch, Launch) for launch in launches):
        raise TypeError(f"{who}: expected launch to be a Launch, or several; got {kernel.launch!r}.")
    object.__setattr__(kernel, "launch", launches)
    object.__setattr__(kernel, "scalars", scalars(kernel.scalars, who))
    if kernel.parameters is not None:
        object.__setattr__(kernel, "parameters", texts(kernel.parameters, "parameters", who))
        unused = [name for name in kernel.scalars if name not in identifiers(kernel.parameters)]
        if unused:
            raise ValueError(
                f"{who}: expected each of scalars to be among parameters; got {unused[0]!r}, which the kernel is not passed. "
                "Name it there, or leave it out."
            )
    frozen_mapping(kernel, "aliases")
    freeze_workspaces(kernel, who)
    check_function(kernel.supports, "supports", who)
    check_function(kernel.out_type, "out_type", who)
    return who


def texts(value: object, field: str, who: str) -> tuple[str, ...]:
    """A text alone is not several."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(text, str) for text in value):
        raise TypeError(f"{who}: expected {field} to be a tuple of texts; got {value!r}.")
    return tuple(value)


def identifiers(parameters: Sequence[str] | None) -> tuple[str, ...]:
    """The names in parameters that may be those of arrays or of numbers."""
    last = [(parameter.replace("*", " ").split() or [""])[-1] for parameter in parameters or ()]
    return tuple(name for name in last if name.isidentifier())
