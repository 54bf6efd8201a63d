"""The checks of arguments that functions and layers have in common."""

import inspect
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ._types import AnyNumber, Size


def check(condition: bool | np.bool_, op: str, expected: str, **got: object) -> None:
    if not condition:
        types = ", ".join(f"{name}: {_shown(value)}" for name, value in got.items())
        raise ValueError(f"{op}: expected {expected}; got {types}.")


def _shown(value: Any) -> str:
    is_size = isinstance(value, int) or jax.export.is_symbolic_dim(value)
    return str(value) if is_size else jax.typeof(value).str_short()


def check_one_of(who: str, name: str, value: object, known: Iterable[str]) -> None:
    known = tuple(known)
    if value not in known:
        raise ValueError(f"{who}: expected {name} to be one of {', '.join(known)}; got {value!r}.")


def check_arrays(who: str, **arrays: object) -> None:
    for name, array in arrays.items():
        if not (hasattr(array, "dtype") and hasattr(array, "shape")):
            raise TypeError(
                f"{who}: expected {name} to be an array; got {type(array).__name__}. `jnp.asarray` makes one of numbers."
            )


def ref_text(leaf: Any) -> str | None:
    """Describe a `jax.Ref` or a view of one, for an error. `None` for all else."""
    if isinstance(leaf, jax.Ref):
        return "a jax.Ref"
    return "a view of a jax.Ref" if isinstance(getattr(leaf, "ref", None), jax.Ref) else None


def check_floats(op: str, **arrays: jax.Array) -> None:
    dtypes = {jnp.result_type(array) for array in arrays.values()}
    floats = all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)
    check(floats and len(dtypes) == 1, op, f"{', '.join(arrays)} of one floating dtype", **arrays)


def signature_of(function: Callable[..., object]) -> inspect.Signature | None:
    """The parameters of the function itself, not those of one that it wraps. Some callables written in C tell none."""
    try:
        return inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return None


def check_runs(who: str, form: str, function: Callable[..., object]) -> None:
    """Refuse functions whose calls make an object, and run nothing of their body."""
    kinds = {
        "coroutine": inspect.iscoroutinefunction(function),
        "generator": inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function),
    }
    for kind, is_one in kinds.items():
        if is_one:
            raise TypeError(
                f"{who}: expected a function {form}; got a {kind} function, of which a call runs nothing. Write it without "
                "`async` and `yield`."
            )


def check_flags(who: str, **flags: object) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            raise TypeError(
                f"{who}: expected {name} to be True or False; got {value!r} of type {type(value).__name__}."
            )


def integer(who: str, expected: str, value: Any, *, least: AnyNumber = -math.inf, remedy: str = "") -> int:
    """`value` as an integer of Python, from one of NumPy too. A bool is none."""
    try:
        index = operator.index(value)
    except TypeError:
        index = None
    if index is None or isinstance(value, bool) or index < least:
        raise ValueError(f"{who}: expected {expected}; got {value!r}. {remedy}".rstrip())
    return index


def number(who: str, expected: str, value: Any, *, least: AnyNumber = -math.inf, most: AnyNumber = math.inf) -> float:
    """`value` as a float of Python. Neither text, which Python would parse, nor NaN is a number."""
    try:
        real = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, OverflowError):
        real = math.nan
    if not least <= real <= most:
        raise ValueError(f"{who}: expected {expected}; got {value!r}.")
    return real


def epsilon(who: str, eps: object) -> float:
    return number(who, "eps to be a number", eps)


def scale_of(who: str, scale: object, size: int) -> float:
    """Return the scale of logits, by default that of softmax of products of `size` numbers."""
    return 1 / math.sqrt(max(size, 1)) if scale is None else number(who, "scale to be a number or None", scale)


def soft_cap_of(who: str, soft_cap: object) -> float | None:
    if soft_cap is None:
        return None
    limits: Any = jnp.finfo(jnp.float32)
    expected = "soft_cap to be a positive number or None"
    cap = number(who, expected, soft_cap, least=float(limits.tiny), most=float(limits.max))
    # Beyond it a cap changes no logit, and quotients by it, or its product with log2(e), would be outside of f32.
    return min(cap, 2.0**100)


def check_loss_options(
    who: str, label_smoothing: object, z_loss: object, ignore_index: object
) -> tuple[float, float, int | None]:
    return (
        number(who, "label_smoothing from 0 to 1", label_smoothing, least=0, most=1),
        number(who, "z_loss to be a number", z_loss),
        None
        if ignore_index is None
        else int(_in_int32(integer(who, "ignore_index to be an integer or None", ignore_index))),  # as labels are
    )


def _in_int32(x: Any) -> Any:
    """Python's and NumPy's integers, the nearest in int32: without x64, JAX cuts off their upper bits."""
    least, most = -(2**31), 2**31 - 1
    if isinstance(x, int) and not isinstance(x, bool):
        return np.int32(min(max(x, least), most))
    if isinstance(x, np.ndarray | np.generic) and np.issubdtype(x.dtype, np.integer) and x.dtype.itemsize > 4:
        return np.clip(x, 0 if x.dtype.kind == "u" else least, most).astype(np.int32)
    return x


def integers(op: str, name: str, x: ArrayLike, batch: tuple[Size, ...]) -> jax.Array:
    """`x`, of shape `batch` or `()`, as int32 of shape `batch`. What int32 lacks becomes its nearest."""
    x = jnp.asarray(_in_int32(x))
    fits = x.shape in ((), batch) and jnp.issubdtype(x.dtype, jnp.integer)
    shapes = f"() or {batch}" if batch else "()"
    check(fits, op, f"{name} to be integers of shape {shapes}", **{name: x})
    limits, int32 = jnp.iinfo(x.dtype), jnp.iinfo(jnp.int32)
    if limits.max > int32.max:
        x = jnp.minimum(x, jnp.asarray(int32.max, x.dtype))
    if limits.min < int32.min:
        x = jnp.maximum(x, jnp.asarray(int32.min, x.dtype))
    return jnp.broadcast_to(x.astype(jnp.int32), batch)
