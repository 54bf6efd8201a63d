"""One call of a kernel on a GPU: what the kernel is asked for, with the types that it sees."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .. import xla
from ..core import Aval, DType, ShapeAndDtype
from ..kernel import DeviceKernel, TensorMap, TritonKernel
from . import _parameters, _tensor_map
from ._bound_kernel import BoundKernel


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One that a kernel has.

    **Attributes:**

    - `position`: of what is passed, among the pointers of the call and then its scalars.
    - `dtype`: of the array that a pointer is to, or of the value; `None` for a null pointer.
    """

    position: int
    name: str
    dtype: DType
    is_pointer: bool

    @property
    def size(self) -> int:
        """The size in bytes."""
        return 8 if self.is_pointer else self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Structure:
    """The value of one.

    **Attributes:**

    - `content`: its bytes, zeros where addresses are.
    - `addresses`: the byte at which each begins, and the position of its array among the pointers of the call.
    """

    content: bytes
    addresses: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class DeviceCall:
    """**Attributes:**

    - `who`: begins an error.
    - `pointers`: name and type of each array of the call, in order: operands, results, workspaces. Of a null pointer the type
        is `None`.
    - `scalars`: name, dtype and value of each. The value of a structure is a `Structure`, and that of a tensor map what the
        launcher takes to encode it.
    - `parameters`: of the kernel, in its order.
    - `args`, `options`: what the kernel's functions are called with.
    """

    who: str
    pointers: tuple[tuple[str, Any], ...]
    workspaces: tuple[ShapeAndDtype, ...]
    scalars: tuple[tuple[str, Any, Any], ...]
    parameters: tuple[Parameter, ...]
    args: tuple[Any, ...]
    options: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        kernel: DeviceKernel,
        bound: BoundKernel,
        operands: Sequence[Aval],
        results: Sequence[Aval],
        who: str,
        **more: object,
    ) -> "DeviceCall":
        """`more`: options that the kernel's functions have beside those of the call."""
        assert bound.arguments is not None
        args, options = bound.arguments(operands, results)
        options = {**options, **more}
        workspaces = workspaces_of(kernel.workspaces, args, options, who)
        pointers = (
            *((name, None if i is None else operands[i]) for name, i in bound.operands),
            *((name, None if i is None else results[i]) for name, i in bound.results),
            *((f"workspace {i}", workspace) for i, workspace in enumerate(workspaces)),
        )

        def value(declared: object, field: str) -> Any:
            return called(declared, field, args, options, who)

        scalars = tuple(
            (
                name,
                dtype,
                _tensor_map.numbers(scalar, name, pointers, value, who)
                if isinstance(scalar, TensorMap)
                else _scalar(name, dtype, scalar, bound, pointers, args, options, who),
            )
            for name, (dtype, scalar) in kernel.scalars.items()
        )
        parameters = (
            *(Parameter(i, name, None if x is None else x.dtype, True) for i, (name, x) in enumerate(pointers)),
            *(Parameter(len(pointers) + i, name, dtype, False) for i, (name, dtype, _) in enumerate(scalars)),
        )
        if not isinstance(kernel, TritonKernel) and kernel.parameters is not None:
            scalars, parameters = _stated(kernel.parameters, pointers, scalars, bound.options, who)
        return cls(who, pointers, workspaces, scalars, parameters, args, options)

    def value(self, declared: object, field: str, **more: object) -> Any:
        """Return the value of a field of the kernel for this call."""
        return called(declared, field, self.args, {**self.options, **more}, self.who)

    @property
    def nulls(self) -> tuple[int, ...]:
        """The positions of the null pointers."""
        return tuple(i for i, (_, aval) in enumerate(self.pointers) if aval is None)

    @property
    def order(self) -> tuple[int, ...] | None:
        """The positions of the parameters, or `None` if they are all pointers and scalars, one after the other."""
        positions = tuple(parameter.position for parameter in self.parameters)
        return None if positions == tuple(range(len(self.pointers) + len(self.scalars))) else positions

    @property
    def starts(self) -> list[int]:
        """The word at which each scalar begins."""
        lengths = [-(-dtype.itemsize // 8) for _, dtype, _ in self.scalars]
        return [0, *itertools.accumulate(lengths)][: len(lengths)]

    @property
    def words(self) -> np.ndarray:
        """The scalars as the launcher takes them: each in the first bytes of its words, and zeros for tensor maps."""
        words = np.zeros(sum(-(-dtype.itemsize // 8) for _, dtype, _ in self.scalars), np.int64)
        for start, (_, dtype, value) in zip(self.starts, self.scalars, strict=True):
            if not isinstance(value, list):
                place = words[start:].view(np.uint8)[: dtype.itemsize]
                content = value.content if isinstance(value, Structure) else np.array(value, dtype).tobytes()
                place[:] = np.frombuffer(content, np.uint8)
        return words

    @property
    def addresses(self) -> list[tuple[int, int]]:
        """The words at which addresses in structures are, and the positions of their arrays among the pointers."""
        return [
            (start + at // 8, position)
            for start, (_, _, value) in zip(self.starts, self.scalars, strict=True)
            if isinstance(value, Structure)
            for at, position in value.addresses
        ]

    @property
    def maps(self) -> list[int]:
        """The numbers of all tensor maps, each after the word at which its bytes begin."""
        placed = (
            [start, *value]
            for start, (_, _, value) in zip(self.starts, self.scalars, strict=True)
            if isinstance(value, list)
        )
        return list(itertools.chain.from_iterable(placed))


_Scalars = tuple[tuple[str, Any, Any], ...]


def _stated(
    texts: Sequence[str],
    pointers: Sequence[tuple[str, object]],
    scalars: _Scalars,
    options: Mapping[str, object],
    who: str,
) -> tuple[_Scalars, tuple[Parameter, ...]]:
    """The scalars that are passed, and all parameters, as a kernel writes them."""
    arrays = {_parameters.short(name): _parameters.Array(i, x) for i, (name, x) in enumerate(pointers)}
    typed = {name: (dtype, value) for name, dtype, value in scalars}
    passed: list[tuple[str, Any, Any]] = []
    parameters = []
    for parameter in _parameters.read(texts, arrays, options, who, typed=typed, pointed=_parameters.OF_CUDA):
        if isinstance(parameter, _parameters.Pointer) and parameter.index is not None:
            parameters.append(Parameter(parameter.index, parameter.name, parameter.dtype, True))
            continue
        is_null = isinstance(parameter, _parameters.Pointer)
        parameters.append(
            Parameter(len(pointers) + len(passed), parameter.name, None if is_null else parameter.dtype, is_null)
        )
        passed.append(
            (parameter.name, np.dtype(np.int64), 0) if is_null else (parameter.name, parameter.dtype, parameter.value)
        )
    return tuple(passed), tuple(parameters)


def _scalar(
    name: str,
    dtype: DType,
    function: Callable[..., object] | None,
    bound: BoundKernel,
    pointers: Sequence[tuple[str, object]],
    args: Sequence[object],
    options: Mapping[str, object],
    who: str,
) -> Any:
    if function is not None:
        value = called(function, f"the scalar {name}", args, options, who)
    elif name in bound.options:
        value = bound.options[name]
    else:
        raise ValueError(
            f"{who}: the scalar {name} is not an option of this call (there are {', '.join(bound.options) or 'none'}). "
            f"Pass it, or say what it is: scalars={{{name!r}: ({dtype.name!r}, function)}}."
        )
    if dtype.type is np.void:
        return _structure(name, dtype, value, pointers, who)
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


def _structure(name: str, dtype: DType, value: object, pointers: Sequence[tuple[str, object]], who: str) -> Structure:
    made = np.zeros(1, dtype)  # what lies between the fields is zero, the same in each process
    try:
        fields = value.item() if isinstance(value, np.ndarray | np.void) and value.dtype == dtype else value
        if isinstance(fields, bytes):
            if len(fields) != dtype.itemsize:
                raise ValueError
            return Structure(fields)
        if not isinstance(fields, tuple):
            raise TypeError
        named = {field: item for field, item in zip(dtype.names or (), fields, strict=True) if isinstance(item, str)}
        numbers = tuple(0 if isinstance(item, str) else item for item in fields)
        if any(isinstance(item, float | np.floating) and dtype[i].kind in "biu" for i, item in enumerate(numbers)):
            raise TypeError
        with np.errstate(over="raise"):
            made[0] = numbers
    except (TypeError, ValueError, ArithmeticError):  # of which an overflow is one
        raise ValueError(
            f"{who}: expected the scalar {name} to be a tuple or {dtype.itemsize} bytes, for {dtype}; got {value!r}."
        ) from None
    arrays = [_parameters.short(array) for array, _ in pointers]
    for field, array in named.items():
        at = dtype.fields[field][1]
        if array not in arrays or dtype[field] != np.uint64 or at % 8:
            raise ValueError(
                f"{who}: expected the field {field} of the scalar {name} to be uint64 at a multiple of 8 bytes, for the address "
                f"of one of {', '.join(arrays) or 'no arrays'}; got {array!r} for {dtype[field]} at {at}."
            )
    return Structure(made.tobytes(), tuple((dtype.fields[f][1], arrays.index(array)) for f, array in named.items()))


def typed(avals: Sequence[Aval]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]


def called(declared: object, field: str, args: Sequence[object], options: Mapping[str, object], who: str) -> Any:
    if not callable(declared):
        return declared
    try:
        return declared(*args, **options)
    except Exception as error:
        raise ValueError(f"{who}: {field} cannot be computed for this call ({error}).") from error


def workspaces_of(
    declared: object, args: Sequence[object], options: Mapping[str, object], who: str
) -> tuple[ShapeAndDtype, ...]:
    workspaces = called(declared, "workspaces", args, options, who)
    try:
        if not isinstance(workspaces, list | tuple):
            raise TypeError("not a tuple")
        for workspace in workspaces:
            xla.result_aval(workspace.shape, workspace.dtype)
    except (AttributeError, TypeError, ValueError) as error:
        raise TypeError(
            f"{who}: expected workspaces to be jax.ShapeDtypeStructs; got {workspaces!r} ({error})."
        ) from None
    return tuple(workspaces)
