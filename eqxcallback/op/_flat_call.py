"""What the calls of an op have in common: forward, tangent, cotangent."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import xla
from . import _batching
from ._axes import Axes
from ._definition import Definition


@dataclasses.dataclass(frozen=True)
class FlatCall(abc.ABC):
    """A function of flat arrays, under some `vmap`s, that JAX's rules are methods of. A subclass says what it is for one
    example.

    **Attributes:**

    - `axes`: those that `vmap` has added.
    """

    definition: Definition
    axes: Axes

    def __repr__(self) -> str:
        return f"{self.definition.name}{self.definition.label}"

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    def __hash__(self) -> int:  # computed once
        return self._hash

    @property
    @abc.abstractmethod
    def example_avals(self) -> Sequence[Any]:
        """The types of the results."""

    @property
    @abc.abstractmethod
    def names(self) -> Sequence[str]:
        """For each operand, the parameter that it belongs to, or `""`."""

    @abc.abstractmethod
    def example(self, *args: Any) -> Sequence[Any]:
        """In pure JAX."""

    @property
    @abc.abstractmethod
    def factors(self) -> xla.Factors:
        """How it may be split between devices."""

    @property
    def description(self) -> str:
        """The same text in each process, and another one for a call that does something else with its kernel."""
        return f"{self!r} {self.factors} {self.definition.batching}"

    def part(self, shapes: Sequence[Sequence[int]]) -> "FlatCall":
        """The call on a part of its operands, of these shapes. For those with a kernel."""
        del shapes
        return self

    @abc.abstractmethod
    def jvp(self, primals: Sequence[Any], outs: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        """The tangents of `outs`. `None` stands for zero, there and in `tangents`."""

    has_side_effect = False
    has_kernel = False

    @property
    def result_avals(self) -> Sequence[Any]:
        return [aval.update(shape=(*self.axes.sizes, *aval.shape)) for aval in self.example_avals]

    def reference(self, *args: Any) -> Sequence[Any]:
        return self.axes.mapped(self.example)(*args)

    def plan(self, platform: str) -> xla.Plan | None:
        del platform
        return None

    def is_python(self, platform: str) -> bool:
        del platform
        return False

    def launch(self, plan: xla.Plan, run: xla.Run, args: Sequence[Any]) -> Sequence[Any]:
        raise NotImplementedError

    def batch(self, args: Sequence[Any], dims: Sequence[int | None]) -> tuple[Sequence[Any], Sequence[int]]:
        (size,) = {arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None}
        batching = self.definition.batching
        if self.has_kernel and _batching.needs_examples(batching, self.names, dims):
            bind = functools.partial(xla.op_call, self)
            return _batching.each_example(batching, bind, args, dims, self.result_avals, self.is_python("cpu"))
        call = dataclasses.replace(self, axes=self.axes.within(size, dims))
        outs = xla.op_call(call, *xla.mapped_first(args, dims))
        return outs, [0] * len(outs)

    def transpose(self, cotangents: Sequence[Any], args: Sequence[Any], linear: Sequence[int]) -> Sequence[Any]:
        """The cotangents of the operands `linear`, in which this is linear. `cotangents` has `None` for zeros."""
        function = of_some(self.reference, args, linear)
        return xla.transpose(function, cotangents, args, linear, self.result_avals)


def of_some(function: Callable[..., Sequence[Any]], args: Sequence[Any], indices: Sequence[int]) -> Callable[..., Any]:
    """`function` as one of the operands `indices` alone."""

    def of_those(*values: Any) -> Sequence[Any]:
        merged = list(args)
        for i, value in zip(indices, values, strict=True):
            merged[i] = value
        return function(*merged)

    return of_those


class LinearCall(FlatCall):
    """Linear in its last operands. Before them come the operands and, if they are saved, the results of the op's call, of which
    it is a function of the operands alone.
    """

    def split(self, args: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        n, m = len(self.definition.input_avals), len(self.definition.saved_avals)
        return args[:n], args[n : n + m], args[n + m :]

    def jvp(self, primals: Sequence[Any], outs: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
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
    """With those of outer axes, which all results have, in front."""
    outer = [f"outer{i}" for i in range(len(axes.sizes))]

    def front(has: Sequence[bool]) -> xla.Dims:
        return tuple(name for name, has_it in zip(outer, has, strict=True) if has_it)

    with_axes = tuple((*front(has), *dims) for has, dims in zip(axes.operands, operands, strict=True))
    return xla.Factors(with_axes, tuple((*outer, *dims) for dims in results))
