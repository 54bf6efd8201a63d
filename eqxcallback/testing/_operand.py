"""One array of what is checked, kept where no kernel can write to it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import DType
from ._findings import host


CASTS = ("float16", "bfloat16", "float32", "float64")


@dataclasses.dataclass(frozen=True, eq=False)
class Operand:
    """**Attributes:**

    - `name`: as in `self.weight` or `args[0][1]`.
    - `root`: what of it is one argument: `self` or `args[0]`.
    - `value`: in NumPy; of a typed PRNG key, its words.
    - `key_impl`: of a typed PRNG key.
    - `is_own`: whether it belongs to the layer itself.
    """

    name: str
    root: str
    value: np.ndarray
    key_impl: str | None
    is_own: bool

    @classmethod
    def of(cls, name: str, root: str, leaf: object, is_own: bool) -> "Operand":
        array = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
        is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
        return cls(name, root, host(array), str(jax.random.key_impl(array)) if is_key else None, is_own)

    @property
    def ndim(self) -> int:
        return self.value.ndim - (self.key_impl is not None)

    @property
    def is_differentiable(self) -> bool:
        # Nobody differentiates with respect to weights of 8 bits.
        return self.key_impl is None and jnp.issubdtype(self.value.dtype, jnp.inexact) and self.value.itemsize > 1

    def array(self, value: np.ndarray | None = None) -> jax.Array:
        """A new one, in memory of its own."""
        array = on_device(self.value if value is None else value)
        return array if self.key_impl is None else jax.random.wrap_key_data(array, impl=self.key_impl)

    def stack(self, values: Sequence[np.ndarray], axis: int = 0) -> jax.Array:
        axis = axis if axis >= 0 else axis + self.ndim + 1
        empty = np.zeros((0, *self.value.shape), self.value.dtype)
        return self.array(np.moveaxis(np.stack(values) if values else empty, 0, axis))

    def example(self, number: int) -> np.ndarray:
        """Other values of the same kind; number 0 is the example itself. Signs stay, and integers and bools are moved along
        the first axis, so that they remain what a kernel takes.
        """
        if number == 0 or self.value.size == 0:
            return self.value
        if self.key_impl is not None:
            return self.value + self.value.dtype.type(number)
        if not self.is_differentiable:
            return np.roll(self.value, number, 0) if self.value.ndim else self.value
        noise = np.random.default_rng((number, self.value.size)).uniform(-1, 1, self.value.shape)
        wide = self.value.astype(np.complex128 if self.value.dtype.kind == "c" else np.float64)
        finite = np.isfinite(wide)
        wide = np.where(finite, wide, 0)
        varied = 0.1 * noise if not wide.any() else wide * (1 + 0.25 * noise)
        return np.where(finite, varied, self.value.astype(varied.dtype)).astype(self.value.dtype)

    def cast(self, dtype: DType) -> "Operand":
        """Cast a floating array to another dtype; return other operands as they are."""
        if self.key_impl is not None or self.value.dtype.name not in CASTS:
            return self
        return dataclasses.replace(self, value=self.value.astype(dtype))

    def direction(self, rng: np.random.Generator) -> np.ndarray:
        return normal(rng, self.value.shape, self.value.dtype)


def on_device(values: object) -> jax.Array:
    """A new array, in memory of its own, for which JAX compiles no program, as `jnp.array` would."""
    return jax.device_put(np.array(values))


def normal(rng: np.random.Generator, shape: Sequence[int], dtype: DType) -> np.ndarray:
    values: Any = rng.standard_normal(shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        values = values + 1j * rng.standard_normal(shape)
    return np.asarray(values, dtype)
