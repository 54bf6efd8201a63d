"""Plain C functions: how a program calls them, once it is known with which types."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import _ext, xla
from ..core import Aval, ShapeAndDtype
from ..kernel import CKernel
from ._bound_kernel import BoundKernel
from ._description import description
from ._device_call import called, typed, workspaces_of
from ._host_compiler import built
from ._library import function_of
from ._parameters import OF_C, Array, Number, Pointer, read, short


_ALL = "parallel"
# As the handler calls them: see csrc/ffi/c_call.cc.
_POINTER, _INTEGER, _FLOAT = range(3)
# What a function without parameters gets: a number that it does not look at. An attribute that is an empty array has no type.
_NOTHING = (1, 0, 0, 0)


def prepare(bound: BoundKernel, kernel: CKernel, platform: str, who: str) -> xla.TypedLowering:
    target = library_target(kernel, platform, who)

    def call(operands: Sequence[Aval], results: Sequence[Aval]) -> xla.LaunchLowering:
        return lowered(target, kernel, bound, who, operands, results)

    def describe() -> str:
        return f"{target} {description(kernel, f'{who}[c]')}"  # the target knows the content of the library

    return xla.TypedLowering(call, target, describe, bound.call, on_threads=True)


def lowered(
    target: str,
    kernel: CKernel,
    bound: BoundKernel,
    op: str,
    operands: Sequence[Aval],
    results: Sequence[Aval],
    code: str = "",
) -> xla.LaunchLowering:
    """A call with arrays of these types.

    **Arguments:**

    - `target`: of the function, which is registered.
    - `code`: what other processes find the function by, whose number is then in place of its address.
    """
    who = f"{op}[{bound.kernel.backend}]"
    assert bound.arguments is not None
    args, options = bound.arguments(typed(operands), typed(results))
    workspaces = workspaces_of(kernel.workspaces, args, options, who)
    arrays, rows = _divided(kernel, bound, arrays_by_name(bound, operands, results, workspaces), len(operands), who)
    functions = {name: called(function, name, args, options, who) for name, function in kernel.scalars.items()}
    passed = read(kernel.parameters, arrays, {**bound.options, **functions}, who, typed={}, pointed=OF_C)
    parameters = [_numbers(parameter) for parameter in passed]
    _check_count(parameters, who)
    texts = kernel.status if isinstance(kernel.status, Mapping) else {}
    attributes = {
        "parameters": np.array(parameters or [_NOTHING], np.int64).ravel(),
        "rows": np.int64(rows),
        "returns_status": np.bool_(kernel.status is not False),
        "statuses": "\n".join(f"{number}={' '.join(text.splitlines())}" for number, text in texts.items()),
        "address": np.int64(kernel.address or 0),
        # One of another process is not found in a cache, and is an error in a program that was saved.
        "process": np.int64(_ext.c_call_process if kernel.address and not code else 0),
        "eqxcallback_code": code,
    }
    made = tuple(xla.result_aval(workspace.shape, workspace.dtype) for workspace in workspaces)
    return xla.LaunchLowering(target, attributes, bound.call, made)


def library_target(kernel: CKernel, platform: str, op: str) -> str:
    who = f"{op}[c]"
    if platform != "cpu":
        raise ValueError(f"{who}: expected the platform cpu; got {platform}. Give {platform} a kernel of another kind.")
    if kernel.address is not None:
        return target_of_addresses(kernel.symbol, op)
    library = kernel.library or built(kernel.source or "", kernel.options, who, is_handler=False)
    function = function_of(library, kernel.symbol, who, 'Export it; of C++ as extern "C".')
    # The name stands in compiled programs: it says what the code is, and that it is not a handler.
    return _registered(kernel.symbol, f"c {function.digest}", function.address, function.set_threads, op)


def target_of_addresses(symbol: str, op: str) -> str:
    """Return the target for functions with the name `symbol` whose addresses are in the calls themselves."""
    return _registered(symbol, "address", 0, 0, op)


def is_of_addresses(target: str) -> bool:
    return target.endswith(_digest("address"))


def _registered(symbol: str, what: str, address: int, set_threads: int, op: str) -> str:
    target = f"eqxcallback_{symbol}_{_digest(what)}"
    try:
        xla.register_c_function(target, symbol, address, set_threads, op)
    except RuntimeError as error:
        raise ValueError(f"{op}[c]: {error}") from None
    return target


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _check_count(parameters: Sequence[tuple[int, ...]], who: str) -> None:
    """Refuse a call whose parameters do not fit into the registers and the stack that the handler fills."""
    integers, floats, stack = _ext.registers_and_stack
    of_floats = sum(kind == _FLOAT for kind, *_ in parameters)
    if max(of_floats - floats, 0) + max(len(parameters) - of_floats - integers, 0) > stack:
        raise ValueError(
            f"{who}: expected at most {integers} pointers and integers, {floats} floating numbers and {stack} more; got "
            f"{len(parameters)} parameters. Write a function around this one that has fewer."
        )


def arrays_by_name(
    bound: BoundKernel, operands: Sequence[Aval], results: Sequence[Aval], workspaces: Sequence[ShapeAndDtype]
) -> dict[str, Array]:
    """Return the arrays of a call, by the names that parameters have for them."""
    avals = [*operands, *results, *workspaces]
    after, last = len(operands), len(operands) + len(results)
    indices = {
        **{short(name): i for name, i in bound.operands},
        **{short(name): None if i is None else after + i for name, i in bound.results},
        **{f"workspace[{i}]": last + i for i in range(len(workspaces))},
    }
    return {name: Array(i, None if i is None else avals[i]) for name, i in indices.items()}


def _numbers(parameter: Pointer | Number) -> tuple[int, int, int, int]:
    """Return the numbers by which the handler knows a parameter."""
    if isinstance(parameter, Pointer):
        return _POINTER, -1 if parameter.index is None else parameter.index, parameter.row_bytes, 0
    value, dtype = parameter.value, parameter.dtype
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            bits = np.array(value, dtype).tobytes().ljust(8, b"\0")
        return _FLOAT, 0, 0, int(np.frombuffer(bits, np.int64)[0])
    return _INTEGER, 0, int(parameter.rows is not None), (int(value) + 2**63) % 2**64 - 2**63


def _divided(
    kernel: CKernel, bound: BoundKernel, arrays: Mapping[str, Array], results: int, who: str
) -> tuple[Mapping[str, Array], int]:
    """The arrays, those that are divided marked, and the number of rows, or -1 if none are.

    **Arguments:** `results`: the index of the first one.
    """
    if kernel.rows is None:
        return arrays, -1
    present: dict[str, Any] = {name: array for name, array in arrays.items() if array.aval is not None}
    names = tuple(present) if kernel.rows == _ALL else kernel.rows
    if unknown := [name for name in names if name not in arrays]:
        raise ValueError(f"{who}: expected rows to be names of arrays ({', '.join(arrays)}); got {unknown[0]!r}.")
    divided = {name: array.aval.shape for name, array in present.items() if name in names}
    sizes = {shape[0] if shape else None for shape in divided.values()}
    # An operand that lacks the axis of the examples may be as long by chance.
    of_one = {name: bound.ranks[array.index] for name, array in present.items() if array.index < len(bound.ranks)}
    in_front = {len(shape) - of_one[name] for name, shape in divided.items() if name in of_one}
    if len(sizes) != 1 or None in sizes or len(in_front) > 1:
        shapes = ", ".join(f"{name} {tuple(shape)}" for name, shape in divided.items())
        raise ValueError(
            f"{who}: expected arrays that are divided to have as many rows; got {shapes}. Name those that are: "
            "rows=('x', 'out')."
        )
    for name, array in present.items():
        if array.index >= results and name not in divided:
            raise ValueError(
                f"{who}: expected {name} to be among rows, as all threads would write all of it. Without rows= one does."
            )
    marked = {name: Array(array.index, array.aval, name in divided) for name, array in arrays.items()}
    return marked, sizes.pop() or 0
