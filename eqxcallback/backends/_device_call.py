"""One call of a kernel on a GPU: what the kernel is asked for, with the types that it sees."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..kernel import DeviceKernel
from ._implementation import Implementation


@dataclasses.dataclass(frozen=True)
class Step:
    """One launch.

    **Attributes:**

    - `image`: the number of its image.
    - `entry`: the kernel's name there.
    """

    image: int
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int


@dataclasses.dataclass(frozen=True)
class Program:
    """Compiled code, and how it is launched.

    **Attributes:**

    - `hidden`: the number of pointers after all parameters that the compiler has added, which may be null.
    """

    images: tuple[bytes, ...]
    steps: tuple[Step, ...]
    hidden: int = 0


@dataclasses.dataclass(frozen=True)
class DeviceCall:
    """**Attributes:**

    - `who`: begins an error.
    - `pointers`: name and type of each array that the kernel gets, in order: operands, results, workspaces.
    - `scalars`: name, dtype and value of each.
    - `args`, `options`: what the kernel's functions are called with.
    """

    who: str
    pointers: tuple[tuple[str, Any], ...]
    workspaces: tuple[Any, ...]
    scalars: tuple[tuple[str, Any, Any], ...]
    args: tuple[Any, ...]
    options: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        kernel: DeviceKernel,
        implementation: Implementation,
        operands: Sequence[Any],
        results: Sequence[Any],
        who: str,
    ) -> "DeviceCall":
        assert implementation.arguments is not None
        args, options = implementation.arguments(operands, results)
        workspaces = kernel.workspaces
        if callable(workspaces):
            workspaces = workspaces(*args, **options)
        workspaces = tuple(workspaces)
        names = [*implementation.names, *(f"workspace {i}" for i in range(len(workspaces)))]
        pointers = tuple(zip(names, [*operands, *results, *workspaces], strict=True))
        scalars = tuple(
            (name, dtype, _scalar(name, dtype, value, implementation, args, options, who))
            for name, (dtype, value) in kernel.scalars.items()
        )
        return cls(who, pointers, workspaces, scalars, args, options)

    def value(self, declared: Any, **more: Any) -> Any:
        """What a field of the kernel is for this call."""
        return declared(*self.args, **self.options, **more) if callable(declared) else declared

    @property
    def words(self) -> np.ndarray:
        """The scalars as the launcher takes them: each in the first bytes of a word."""
        words = np.zeros(len(self.scalars), np.int64)
        for word, (_, dtype, value) in zip(words.view(np.uint8).reshape(-1, 8), self.scalars, strict=True):
            word[: dtype.itemsize] = np.array(value, dtype)[None].view(np.uint8)
        return words


def _scalar(
    name: str,
    dtype: Any,
    function: Callable[..., Any] | None,
    implementation: Implementation,
    args: Sequence[Any],
    options: Mapping[str, Any],
    who: str,
) -> Any:
    if function is not None:
        value = function(*args, **options)
    elif name in implementation.options:
        value = implementation.options[name]
    else:
        raise ValueError(
            f"{who}: the scalar {name} is no option of this call (there are {', '.join(implementation.options) or 'none'}). "
            f"Pass it, or say what it is: scalars={{{name!r}: ({dtype.name!r}, function)}}."
        )
    try:
        exact = np.asarray(value)
        if exact.shape != () or exact.dtype.kind not in "biuf" or (exact.dtype.kind == "f" and dtype.kind != "f"):
            raise TypeError
        dtype.type(exact.item())  # NumPy refuses integers that do not fit
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{who}: expected the scalar {name} to be a {dtype.name}; got {value!r}.") from None
    return exact.item()


def typed(avals: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
