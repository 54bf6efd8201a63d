"""JAX's settings that change what a function computes, as they are where an op is called.

A reference is traced when the program around the call is lowered. The `with` blocks of the caller have ended by then.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax

from ..core import ShapeAndDtype, type_text


_config: Any = jax.config  # its options are made at run time: no type checker knows them


_WIDE = ("int64", "uint64", "float64", "complex128")


class Settings(NamedTuple):
    """A field has the name of the function of `jax` that sets it."""

    enable_x64: bool
    default_matmul_precision: Any
    default_prng_impl: str
    threefry_partitionable: bool
    numpy_dtype_promotion: str
    numpy_rank_promotion: str

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name, value, present in zip(self._fields, self, settings(), strict=True):
                if value != present:
                    stack.enter_context(getattr(jax, name)(value))
            yield

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, traced under these settings."""

        @functools.wraps(function)
        def under_settings(*args: Any, **kwargs: Any) -> Any:
            with self.applied():
                return function(*args, **kwargs)

        return under_settings

    def check_widths(self, results: Iterable[ShapeAndDtype], who: str) -> None:
        """Raise `ValueError` for results of 64 bits, where JAX has no such types: its next operation would change them."""
        if self.enable_x64:
            return
        for result in results:
            if str(result.dtype) in _WIDE:
                raise ValueError(
                    f"{who}: expected results without 64-bit types, because jax_enable_x64 is off; got "
                    f"{type_text(result.dtype, result.shape)}. Return narrower types, or enable x64."
                )


def settings() -> Settings:
    """The present ones."""
    return Settings(  # by position: eager calls ask each time
        _config.jax_enable_x64,
        _config.jax_default_matmul_precision,
        _config.jax_default_prng_impl,
        _config.jax_threefry_partitionable,
        _config.jax_numpy_dtype_promotion,
        _config.jax_numpy_rank_promotion,
    )
