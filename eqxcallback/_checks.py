"""What functions and layers have in common when they check their arguments."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def check(condition: bool, op: str, expected: str, **got: Any) -> None:
    if not condition:
        types = ", ".join(
            f"{name}: {value if isinstance(value, int) else jax.typeof(value).str_short()}"
            for name, value in got.items()
        )
        raise ValueError(f"{op}: expected {expected}; got {types}.")


def check_one_of(who: str, name: str, value: Any, known: Iterable[str]) -> None:
    known = tuple(known)
    if value not in known:
        raise ValueError(f"{who}: expected {name} to be one of {', '.join(known)}; got {value!r}.")


def check_floats(op: str, **arrays: jax.Array) -> None:
    dtypes = {jnp.result_type(array) for array in arrays.values()}
    floats = all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)
    check(floats and len(dtypes) == 1, op, f"{', '.join(arrays)} of one floating dtype", **arrays)


def integers(op: str, name: str, x: ArrayLike, batch: tuple[int, ...]) -> jax.Array:
    """`x`, of shape `batch` or `()`, as int32 of shape `batch`. What int32 lacks becomes its nearest."""
    x = jnp.asarray(x)
    fits = x.shape in ((), batch) and jnp.issubdtype(x.dtype, jnp.integer)
    check(fits, op, f"{name} to be integers of shape () or {batch}", **{name: x})
    own, int32 = jnp.iinfo(x.dtype), jnp.iinfo(jnp.int32)
    if own.max > int32.max:
        x = jnp.minimum(x, jnp.asarray(int32.max, x.dtype))
    if own.min < int32.min:
        x = jnp.maximum(x, jnp.asarray(int32.min, x.dtype))
    return jnp.broadcast_to(x.astype(jnp.int32), batch)
