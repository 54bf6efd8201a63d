"""One call of a kernel on a GPU: what the kernel is asked for, with the types that it sees."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..kernel import DeviceKernel
from ._bound_kernel import BoundKernel


@dataclasses.dataclass(frozen=True)
class DeviceCall:
    """**Attributes:**

    - `who`: begins an error.
    - `pointers`: name and type of each array that the kernel gets, in order: operands, results, workspaces. Of a null pointer
        the type is `None`.
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
        bound: BoundKernel,
        operands: Sequence[Any],
        results: Sequence[Any],
        who: str,
    ) -> "DeviceCall":
        assert bound.arguments is not None
        args, options = bound.arguments(operands, results)
        workspaces = _called(kernel.workspaces, "workspaces", args, options, who)
        if not isinstance(workspaces, list | tuple) or not all(map(_is_type, workspaces)):
            raise TypeError(f"{who}: expected workspaces to be jax.ShapeDtypeStructs; got {workspaces!r}.")
        workspaces = tuple(workspaces)
        pointers = (
            *((name, None if i is None else operands[i]) for name, i in bound.operands),
            *((name, None if i is None else results[i]) for name, i in bound.results),
            *((f"workspace {i}", workspace) for i, workspace in enumerate(workspaces)),
        )
        scalars = tuple(
            (name, dtype, _scalar(name, dtype, value, bound, args, options, who))
            for name, (dtype, value) in kernel.scalars.items()
        )
        return cls(who, pointers, workspaces, scalars, args, options)

    def value(self, declared: Any, field: str, **more: Any) -> Any:
        """What a field of the kernel is for this call."""
        return _called(declared, field, self.args, {**self.options, **more}, self.who)

    @property
    def nulls(self) -> tuple[int, ...]:
        """The positions of the null pointers."""
        return tuple(i for i, (_, aval) in enumerate(self.pointers) if aval is None)

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
    bound: BoundKernel,
    args: Sequence[Any],
    options: Mapping[str, Any],
    who: str,
) -> Any:
    if function is not None:
        value = _called(function, f"the scalar {name}", args, options, who)
    elif name in bound.options:
        value = bound.options[name]
    else:
        raise ValueError(
            f"{who}: the scalar {name} is no option of this call (there are {', '.join(bound.options) or 'none'}). "
            f"Pass it, or say what it is: scalars={{{name!r}: ({dtype.name!r}, function)}}."
        )
    try:
        exact = np.asarray(value)
        if exact.shape != () or exact.dtype.kind not in "biuf" or (exact.dtype.kind == "f" and dtype.kind != "f"):
            raise TypeError
        with np.errstate(over="ignore"):
            fitted = dtype.type(exact.item())  # NumPy refuses integers that do not fit
        if exact.dtype.kind == "f" and np.isfinite(exact) and not np.isfinite(fitted):
            raise OverflowError
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{who}: expected the scalar {name} to be {dtype.name}; got {value!r}.") from None
    return exact.item()


def _called(declared: Any, field: str, args: Sequence[Any], options: Mapping[str, Any], who: str) -> Any:
    if not callable(declared):
        return declared
    try:
        return declared(*args, **options)
    except Exception as error:
        raise ValueError(f"{who}: {field} cannot be computed for this call ({error}).") from error


def _is_type(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")
