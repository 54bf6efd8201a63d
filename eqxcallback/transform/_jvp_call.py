"""The derivative of an op in a direction, which is linear in the direction: transposed, it is the backward kernel."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from .. import xla
from ..core import Aval, Value
from . import _axes
from ._axes import Axes
from ._flat_call import FlatCall, LinearCall, around, of_some
from ._vjp_call import VjpCall


if TYPE_CHECKING:
    from ._forward_call import ForwardCall


@dataclasses.dataclass(frozen=True, repr=False)
class JvpCall(LinearCall):
    """The tangents of a call. Its operands are those of `call`, its saved results, and the tangents of the operands `active`. Its
    results are the tangents of the results `results`, which are those of floating type.
    """

    call: "ForwardCall"
    active: tuple[int, ...]
    results: tuple[int, ...]

    __hash__ = FlatCall.__hash__

    @classmethod
    def of(cls, call: "ForwardCall", active: tuple[int, ...]) -> "JvpCall":
        bound = call.bound
        visible = bound.result_avals[: bound.num_results]
        results = tuple(i for i, aval in enumerate(visible) if jnp.issubdtype(aval.dtype, jnp.inexact))
        num_operands = len(bound.input_avals) + len(bound.saved_avals) + len(active)
        return cls(bound, Axes.none(num_operands), call, active, results)

    def __repr__(self) -> str:
        return f"{self.call!r}.jvp"

    @property
    def example_avals(self) -> Sequence[Aval]:
        avals = self.call.result_avals
        return [avals[i] for i in self.results]

    @property
    def names(self) -> Sequence[str]:
        return [""] * len(self.axes.operands)

    @property
    def factors(self) -> xla.Factors:
        inner = self.call.factors
        saved = inner.results[: len(self.bound.saved_avals)]
        operands = [*inner.operands, *saved, *(inner.operands[i] for i in self.active)]
        return around(self.axes, operands, [inner.results[i] for i in self.results])

    def example(self, *args: Value) -> Sequence[Value]:
        def of(function: Callable[..., Sequence[Value]]) -> Callable[..., Sequence[Value]]:
            def pushed(*args: Value) -> Sequence[Value]:
                primals, _, tangents = self.split(args)
                function_of_some = of_some(function, primals, self.active)
                return jax.jvp(function_of_some, [primals[i] for i in self.active], list(tangents))[1]

            return pushed

        return self.call.derivatives(of, *args, results=self.results)

    def transpose(self, cotangents: Sequence[Value], args: Sequence[Value], linear: Sequence[int]) -> Sequence[Value]:
        inputs, results, _ = self.split(args)
        first = len(inputs) + len(results)
        if self.bound.backward is None or min(linear) < first:
            return super().transpose(cotangents, args, linear)
        given = dict(zip(self.results, cotangents, strict=True))
        avals = self.call.result_avals[: self.bound.num_results]
        filled = [
            jnp.zeros((*self.axes.sizes, *aval.shape), aval.dtype) if given.get(i) is None else given[i]
            for i, aval in enumerate(avals)
        ]
        needs_grad = tuple(self.active[i - first] for i in linear)
        gradients = xla.op_call(VjpCall.of(self, needs_grad), *inputs, *results, *filled)
        every = (True,) * len(self.axes.sizes)
        return [
            _axes.reduced(gradient, every, self.axes.operands[i]) for i, gradient in zip(linear, gradients, strict=True)
        ]
