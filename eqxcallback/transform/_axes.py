"""The axes that `vmap` has added to a call, and the form in which a kernel sees them."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp

from .. import xla
from ..core import Size, Value


Has = tuple[bool, ...]
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Axes:
    """**Attributes:**

    - `sizes`: of the axes, the outermost first.
    - `operands`: for each flat operand, which of them it has. It has them in front, in order.
    """

    sizes: tuple[Size, ...]
    operands: tuple[Has, ...]

    @classmethod
    def none(cls, num_operands: int) -> "Axes":
        return cls((), ((),) * num_operands)

    def within(self, size: Size, dims: Sequence[int | None]) -> "Axes":
        """Return these axes with one more around them, which the operands with a dim have."""
        operands = zip(dims, self.operands, strict=True)
        return Axes((size, *self.sizes), tuple((dim is not None, *has) for dim, has in operands))

    def dims(self, has: Has) -> xla.Dims:
        """The factors of the axes that an array has: they may always be split."""
        return tuple(f"vmap{i}" for i, has_it in enumerate(has) if has_it)

    def mapped(self, function: Callable[..., Sequence[Value]]) -> Callable[..., Sequence[Value]]:
        """`function` of one example, over these axes. All results have them all."""
        for level, size in reversed(list(enumerate(self.sizes))):
            in_axes = tuple(0 if has[level] else None for has in self.operands)
            function = jax.vmap(function, in_axes=in_axes, axis_size=size)
        return function


def present(sizes: Sequence[_T], has: Sequence[bool]) -> tuple[_T, ...]:
    """Return the sizes of the axes that an array `has`."""
    return tuple(size for size, has_it in zip(sizes, has, strict=True) if has_it)


def absent(has: Has) -> Has:
    """Tell which axes an array lacks."""
    return tuple(not has_it for has_it in has)


def merged(has: Has, others: Has) -> Has:
    """Return `has` where it is true, and `others` in their order at the other axes."""
    rest = iter(others)
    return tuple(has_it or next(rest) for has_it in has)


# What a kernel takes of an operand that has the axes `has` of those of `sizes`.


def batched(arg: Value, has: Has, sizes: Sequence[Size]) -> Value:
    """Broadcast to all axes."""
    example_shape = arg.shape[sum(has) :]
    return jnp.broadcast_to(expanded(arg, has, sizes), (*sizes, *example_shape))


def expanded(arg: Value, has: Has, sizes: Sequence[Size]) -> Value:
    """Return `arg` with all axes, of size 1 where it has none."""
    del sizes
    return jnp.expand_dims(arg, [i for i, has_it in enumerate(has) if not has_it])


def folded(arg: Value, has: Has, sizes: Sequence[Size]) -> Value:
    """Return `arg` with all axes in one."""
    example_shape = arg.shape[sum(has) :]
    return batched(arg, has, sizes).reshape(math.prod(sizes), *example_shape)


def extended(arg: Value, has: Has, wanted: Has | None, sizes: Sequence[Size]) -> Value:
    """Return `arg` with the axes `wanted`, of which it `has` some. `None` stands for all axes, of size 1 where it has none."""
    if has == wanted:
        return arg
    if wanted is None:
        return expanded(arg, has, sizes)
    among = [i for i, wants in enumerate(wanted) if wants]
    return batched(arg, tuple(has[i] for i in among), [sizes[i] for i in among])


def of_examples(
    arg: Value, has: Has, is_mapped: bool, wanted: Has | None, examples: int, sizes: Sequence[Size]
) -> Value:
    """Return `arg` with so many axes, the first, in one if it `is_mapped`, and else without them; then as `extended` to those
    `wanted` of the others.
    """
    outer, inner = (is_mapped,) * examples, has[examples:]
    arg = extended(arg, has, (*outer, *(inner if wanted is None else wanted)), sizes)
    in_front = ()
    if is_mapped:
        arg = arg.reshape(math.prod(sizes[:examples]), *arg.shape[examples:])
        in_front = (True,)
    return expanded(arg, (*in_front, *inner), sizes) if wanted is None else arg


def reordered(arg: Value, has: Has, order: Sequence[int]) -> Value:
    """Return `arg` with the axes that it `has` in this order of all axes."""
    own = [i for i, has_it in enumerate(has) if has_it]
    moved = [own.index(i) for i in order if has[i]]
    return jnp.transpose(arg, [*moved, *range(len(own), arg.ndim)])


def restored(arg: Value, has: Has, order: Sequence[int]) -> Value:
    """Undo `reordered`."""
    places = {axis: place for place, axis in enumerate(i for i in order if has[i])}
    own = [places[i] for i in sorted(places)]
    return jnp.transpose(arg, [*own, *range(len(own), arg.ndim)])


def front(sizes: Sequence[Size], has: Has, wanted: Has | None) -> tuple[Size, ...]:
    """The sizes of the axes in front of what `extended` returns."""
    if wanted is None:
        return tuple(size if has_it else 1 for size, has_it in zip(sizes, has, strict=True))
    return present(sizes, wanted)


def reduced(arg: Value, has: Has, wanted: Has) -> Value:
    """Return `arg` summed over the axes in front that it `has` but should not have."""
    present = [wants for wants, has_it in zip(wanted, has, strict=True) if has_it]
    missing = tuple(i for i, wants in enumerate(present) if not wants)
    return jnp.sum(arg, missing, dtype=arg.dtype) if missing else arg
