"""Functions that Numba compiles: C functions at an address, once it is known for which types."""

import functools
import importlib
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .. import xla
from ..core import Aval
from ..kernel import CKernel, NumbaKernel
from . import _c, _parameters
from ._bound_kernel import BoundKernel
from ._description import description
from ._object_code import ObjectCode, load_object_code, object_code


_RAISED = "it raised an exception, whose text Numba does not tell; call the function with NumPy's arrays to see it"
# What Numba calls numbers, and C.
_NUMBERS = {bool: ("boolean", "bool"), int: ("int64", "int64_t"), float: ("float64", "double")}


def prepare(bound: BoundKernel, kernel: NumbaKernel, platform: str, who: str) -> xla.TypedLowering:
    if platform != "cpu":
        raise ValueError(
            f"{who}[numba]: expected the platform cpu; got {platform}. Give {platform} a kernel of another kind."
        )

    target = _c.target_of_addresses(_symbol(kernel), who)

    def call(operands: Sequence[Aval], results: Sequence[Aval]) -> xla.LaunchLowering:
        arrays = [
            *((name, None if i is None else results[i]) for name, i in bound.results),
            *((name, None if i is None else operands[i]) for name, i in bound.operands),
        ]
        function, code = _compiled(kernel, arrays, bound.options, f"{who}[numba]")
        text = code.text(who, function.symbol) if code else ""
        return _c.lowered(target, function, bound, who, operands, results, text)

    return xla.TypedLowering(call, target, functools.partial(description, kernel, who), bound.call, on_threads=True)


def load_code(target: str, code: str) -> None:
    """Register `target` and load its code, of a program that another process has made.

    **Raises:** `ValueError` if it cannot run here.
    """
    op, symbol = load_object_code(code)
    registered = _c.target_of_addresses(symbol, op)
    if registered != target:
        xla.target_for_each(registered)


def need_numba() -> Any:
    try:
        return importlib.import_module("numba")
    except ImportError as error:
        raise ImportError(f"numba cannot be imported ({error}). Install eqxcallback[numba].") from None


def _compiled(
    kernel: NumbaKernel, arrays: Sequence[tuple[str, Any]], options: Mapping[str, Any], who: str
) -> tuple[CKernel, ObjectCode | None]:
    """The C function of the call, and its parameters, and its code, if that can leave the process."""
    try:
        numba = need_numba()
    except ImportError as error:
        raise ValueError(f"{who}: {error}") from None
    types, parameters, given = [], [], []
    for name, aval in arrays:
        if aval is None:
            given.append("None")
            continue
        first = len(types)
        types += [numba.types.CPointer(_type_of(numba, name, aval, who)), *[numba.types.int64] * len(aval.shape)]
        shape = "".join(f"p{first + 1 + axis}, " for axis in range(len(aval.shape)))
        given.append(f"carray(p{first}, ({shape}))")
        short = _parameters.short(name)
        parameters += [short, *(f"int64_t {short}.shape[{axis}]" for axis in range(len(aval.shape)))]
    scalars = {}
    # Numba takes arguments by name for those in the order of the call.
    for name in _in_order(kernel, len(arrays), options, who):
        value = options[name]
        if isinstance(value, np.generic):
            value = value.item()
        if type(value) not in _NUMBERS:
            raise ValueError(f"{who}: expected the option {name} to be a bool, an int or a float; got {value!r}.")
        of_numba, of_c = _NUMBERS[type(value)]
        given.append(f"p{len(types)}")
        types.append(getattr(numba.types, of_numba))
        parameters.append(f"{of_c} {name}")
        scalars[name] = value
    text = _WRAPPER.format(parameters=", ".join(f"p{i}" for i in range(len(types))), function=", ".join(given))
    try:
        made = _made(kernel.function, tuple(sorted(kernel.options.items())), text, tuple(types))
    except Exception as error:  # Numba's errors have no base
        raise ValueError(f"{who}: Numba does not compile {kernel.name} for these types:\n{error}") from error
    address, code = made
    function = CKernel(_symbol(kernel), None, tuple(parameters), address=address, rows=kernel.rows, status={1: _RAISED})
    return function, code


def _symbol(kernel: NumbaKernel) -> str:
    return re.sub(r"\W", "_", kernel.name)


def _in_order(kernel: NumbaKernel, count: int, options: Mapping[str, object], who: str) -> Sequence[str]:
    """The options, as the function has parameters for them after those of `count` arrays."""
    names = kernel.names[count:]
    if len(kernel.names) < count or set(names) != set(options):
        raise ValueError(
            f"{who}: expected {kernel.name} to take {count} arrays, the results first, and then the options "
            f"({', '.join(options) or 'none'}); got the parameters {', '.join(kernel.names)}."
        )
    return names


_WRAPPER = """
def wrapper({parameters}):
    try:
        function({function})
    except Exception:
        return 1
    return 0
"""


# What was made of a function, for the options, the wrapper and the types. It goes with the function, but for what is loaded.
_all_made: weakref.WeakKeyDictionary[Callable[..., Any], dict[Any, Any]] = weakref.WeakKeyDictionary()
_kept: list[Any] = []  # programs have addresses in them


def _made(
    function: Callable[..., object], options: tuple[tuple[str, Any], ...], text: str, types: tuple[object, ...]
) -> tuple[int, ObjectCode | None]:
    """The number of code that is loaded, and the code; or an address, of what only this process can call."""
    known = _all_made.setdefault(function, {})
    key = options, text, types
    if key not in known:
        compiled = _cfunc(function, options, text, types)
        code = object_code(compiled)
        if code is None:
            _kept.append(compiled)
            known[key] = compiled.address, None
        else:
            code.load()
            known[key] = code.number, code
    return known[key]


def _cfunc(
    function: Callable[..., object], options: tuple[tuple[str, Any], ...], text: str, types: tuple[object, ...]
) -> Any:
    numba = need_numba()
    given = {name: set(value) if isinstance(value, frozenset) else value for name, value in options}
    compiled = function if hasattr(function, "py_func") else numba.njit(function, **given)
    names: dict[str, Any] = {"function": compiled, "carray": numba.carray}
    exec(compile(text, "<eqxcallback numba>", "exec"), names)
    return numba.cfunc(numba.types.int32(*types))(names["wrapper"])


def _type_of(numba: Any, name: str, aval: Aval, who: str) -> Any:
    try:
        if aval.dtype == np.float16:  # it has the type, and on a CPU no arithmetic
            raise TypeError
        return numba.from_dtype(np.dtype(aval.dtype))
    except Exception:  # its own class of errors
        raise ValueError(
            f"{who}: expected arrays of types that Numba has; got {np.dtype(aval.dtype).name} for {name}. Cast it in a function "
            "around the op."
        ) from None
