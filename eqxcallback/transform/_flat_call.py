"""A base for the calls of an op: forward, jvp, vjp."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import xla
from ..core import Aval, Size, Value, is_quiet, warn_once
from ..kernel import NativeKernel
from . import _batching, _preference
from ._axes import Axes
from ._bound_op import BoundOp
from ._choice import Choice


@dataclasses.dataclass(frozen=True)
class FlatCall(abc.ABC):
    """A function of flat arrays, under some `vmap`s, that JAX's rules are methods of. A subclass says what it is for one
    example.

    **Attributes:**

    - `axes`: those that `vmap` has added.
    - `examples`: for how many examples `vmap` makes this call, one after the other, because no `vmap_method` is stated.
    """

    bound: BoundOp
    axes: Axes
    examples: int = dataclasses.field(default=1, kw_only=True)

    def __repr__(self) -> str:
        return f"{self.bound.name}{self.bound.label}"

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    def __hash__(self) -> int:  # computed once
        return self._hash

    @property
    @abc.abstractmethod
    def example_avals(self) -> Sequence[Aval]:
        """The types of the results."""

    @property
    @abc.abstractmethod
    def names(self) -> Sequence[str]:
        """The parameter that each operand belongs to, or `""`."""

    @abc.abstractmethod
    def example(self, *args: Value) -> Sequence[Value]:
        """Compute one example in pure JAX."""

    @property
    @abc.abstractmethod
    def factors(self) -> xla.Factors:
        """The way in which the call may be split between devices."""

    @property
    def description(self) -> str:
        """The same text in each process, and another one for a call that does something else with its kernel."""
        return f"{self!r} {self.factors} {self.bound.batching}"

    def part(self, shapes: Sequence[Sequence[Size]]) -> "FlatCall":
        """The call on a part of its operands, of these shapes. For those with a kernel."""
        del shapes
        return self

    @abc.abstractmethod
    def jvp(self, primals: Sequence[Value], outs: Sequence[Value], tangents: Sequence[Value]) -> Sequence[Value]:
        """The tangents of `outs`. `None` stands for zero, there and in `tangents`."""

    has_side_effect = False
    is_plain = False

    @functools.cached_property
    def _choices(self) -> dict[tuple[str, int, bool], Choice]:
        return {}

    def choice(self, platform: str) -> Choice:
        """The kernel that runs. Eager calls ask for it each time."""
        key = platform, _preference.version(), is_quiet()  # a quiet choice has not said what it warns of
        known = self._choices.get(key)
        if known is None:
            known = self._choices[key] = self._choice(platform, anywhere=False)
        return known

    def _choice(self, platform: str, *, anywhere: bool) -> Choice:
        """**Arguments:** `anywhere` is whether a kernel may need a compiler that is not here."""
        del platform, anywhere
        return Choice(None)

    @functools.cached_property
    def has_kernel(self) -> bool:
        """True if some kernel takes the call. While it is traced, its platform is not known: no compiler has to be here."""
        return any(self._choice(platform, anywhere=True).kernel is not None for platform in self.bound.forward)

    @property
    def result_avals(self) -> Sequence[Aval]:
        return [aval.update(shape=(*self.axes.sizes, *aval.shape)) for aval in self.example_avals]

    def reference(self, *args: Value) -> Sequence[Value]:
        return self.axes.mapped(self.example)(*args)

    def lowering(self, platform: str) -> xla.Lowering | None:
        kernel = self.choice(platform).kernel
        return None if kernel is None else self.bound.lowering(kernel, platform)

    def is_python(self, platform: str) -> bool:
        kernel = self.choice(platform).kernel
        return kernel is not None and kernel.body is not None

    def native_name(self, platform: str) -> str | None:
        kernel = self.choice(platform).kernel
        return self.bound.name if kernel is not None and isinstance(kernel.kernel, NativeKernel) else None

    def launch(self, lowering: xla.Lowering, run: xla.Run, args: Sequence[Value]) -> Sequence[Value]:
        raise NotImplementedError

    def batch(self, args: Sequence[Value], dims: Sequence[int | None]) -> tuple[Sequence[Value], Sequence[int]]:
        (size,) = {arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None}
        bound, is_python = self.bound, self.is_python("cpu")
        method = _batching.looping_method(
            bound.batching, self.names, dims, needs_kernel=bound.needs_kernel, is_python=is_python
        )
        if method is not None and self.has_kernel:
            bind = functools.partial(xla.op_call, self._for_each(size))
            return _batching.each_example(method, bind, args, dims, self.result_avals, is_python)
        call = dataclasses.replace(self, axes=self.axes.within(size, dims))
        outs = xla.op_call(call, *xla.mapped_first(args, dims))
        return outs, [0] * len(outs)

    def _for_each(self, size: Size) -> "FlatCall":
        """The call that is made for each of so many examples."""
        if _batching.is_stated(self.bound.batching):
            return self
        warn_once(
            f"{self.bound.who}: jax.vmap calls its kernel for each example, because no vmap_method is stated. That is right for "
            'any kernel. If this one takes operands with a leading axis, vmap_method = "fold" is one call; '
            'vmap_method = "sequential" states what it does now.'
        )
        return dataclasses.replace(self, examples=size * self.examples)

    def transpose(self, cotangents: Sequence[Value], args: Sequence[Value], linear: Sequence[int]) -> Sequence[Value]:
        """The cotangents of the operands `linear`, in which this is linear. `cotangents` has `None` for zeros."""
        function = of_some(self.reference, args, linear)
        return xla.transpose(function, cotangents, args, linear, self.result_avals)


def of_some(
    function: Callable[..., Sequence[Value]], args: Sequence[Value], indices: Sequence[int]
) -> Callable[..., Any]:
    """`function` as one of the operands `indices` alone."""

    def of_those(*values: Value) -> Sequence[Value]:
        merged = list(args)
        for i, value in zip(indices, values, strict=True):
            merged[i] = value
        return function(*merged)

    return of_those


class LinearCall(FlatCall):
    """Linear in its last operands. Before them come the operands and, if they are saved, the results of the op's call, of which
    it is a function of the operands alone.
    """

    def split(self, args: Sequence[Value]) -> tuple[Sequence[Value], Sequence[Any], Sequence[Any]]:
        n, m = len(self.bound.input_avals), len(self.bound.saved_avals)
        return args[:n], args[n : n + m], args[n + m :]

    def jvp(self, primals: Sequence[Value], outs: Sequence[Value], tangents: Sequence[Value]) -> Sequence[Value]:
        inputs, results, linear = self.split(primals)
        d_inputs, _, d_linear = self.split(tangents)
        parts = []
        if any(tangent is not None for tangent in d_linear):
            # The same call, so that the kernel runs, and can be transposed.
            filled = [jnp.zeros_like(x) if dx is None else dx for x, dx in zip(linear, d_linear, strict=True)]
            parts.append(xla.op_call(self, *inputs, *results, *filled))
        active = [i for i, tangent in enumerate(d_inputs) if tangent is not None]
        if active:
            function = of_some(self.reference, primals, active)
            parts.append(jax.jvp(function, [inputs[i] for i in active], [d_inputs[i] for i in active])[1])
        return [sum(terms[1:], terms[0]) for terms in zip(*parts, strict=True)] if parts else [None] * len(outs)


def around(axes: Axes, operands: Sequence[xla.Dims], results: Sequence[xla.Dims]) -> xla.Factors:
    """Put the outer axes, which all results have, in front of the dimensions of operands and results."""
    outer = [f"outer{i}" for i in range(len(axes.sizes))]

    def front(has: Sequence[bool]) -> xla.Dims:
        return tuple(name for name, has_it in zip(outer, has, strict=True) if has_it)

    with_axes = tuple((*front(has), *dims) for has, dims in zip(axes.operands, operands, strict=True))
    return xla.Factors(with_axes, tuple((*outer, *dims) for dims in results))
