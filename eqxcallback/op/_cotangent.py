"""The backward kernel of an op, and what it is in pure JAX."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from .. import xla
from . import _axes, _batching
from ._axes import Axes
from ._flat_call import FlatCall, LinearCall, around, of_some


if TYPE_CHECKING:
    from ._call import Call
    from ._tangent import Tangent


@dataclasses.dataclass(frozen=True, repr=False)
class Cotangent(LinearCall):
    """Its operands are those of the op's call, the results of it, and the cotangents of the results that callers see. Its
    results are the gradients of the operands `asked`, summed over the axes that these lack in the call. `results` are
    those of floating type.
    """

    call: "Call"
    asked: tuple[int, ...]
    results: tuple[int, ...]

    __hash__ = FlatCall.__hash__

    @classmethod
    def of(cls, tangent: "Tangent", asked: tuple[int, ...]) -> "Cotangent":
        """With the axes of `tangent`."""
        outer, num_results = tangent.axes, tangent.definition.num_results
        primals = outer.operands[: len(outer.operands) - len(tangent.active)]
        axes = Axes(outer.sizes, (*primals, *[(True,) * len(outer.sizes)] * num_results))
        return cls(tangent.definition, axes, tangent.call, asked, tangent.results)

    def __repr__(self) -> str:
        return f"{self.call!r}.vjp"

    @property
    def example_avals(self) -> Sequence[Any]:
        inner, avals = self.call.axes, self.definition.input_avals
        return [avals[i].update(shape=(*_present(inner.sizes, inner.operands[i]), *avals[i].shape)) for i in self.asked]

    @property
    def names(self) -> Sequence[str]:
        return [*self.definition.names, *[""] * (len(self.axes.operands) - len(self.definition.names))]

    @property
    def has_kernel(self) -> bool:
        return bool(self.definition.forward)

    @property
    def factors(self) -> xla.Factors:
        inner, num_results = self.call.factors, self.definition.num_results
        own = [*inner.operands, *inner.results, *inner.results[:num_results]]
        factors = around(self.axes, own, [inner.operands[i] for i in self.asked])
        return dataclasses.replace(factors, sums=True)

    def part(self, shapes: Sequence[Sequence[int]]) -> "Cotangent":
        sizes = self.factors.sizes(shapes)
        count = len(self.definition.input_avals)
        own = [shape[sum(has) :] for shape, has in zip(shapes, self.axes.operands, strict=True)][:count]
        axes = Axes(tuple(sizes[f"outer{i}"] for i in range(len(self.axes.sizes))), self.axes.operands)
        inner_sizes = tuple(sizes[f"vmap{i}"] for i in range(len(self.call.axes.sizes)))
        examples = [shape[sum(has) :] for shape, has in zip(own, self.call.axes.operands, strict=True)]
        definition = self.definition.part(examples)
        call = dataclasses.replace(self.call, definition=definition, axes=Axes(inner_sizes, self.call.axes.operands))
        return dataclasses.replace(self, definition=definition, axes=axes, call=call)

    def example(self, *args: Any) -> Sequence[Any]:
        primals, _, cotangents = self.split(args)
        function = of_some(self.call.differentiable(self.results), primals, self.asked)
        _, pullback = jax.vjp(function, *(primals[i] for i in self.asked))
        return pullback([cotangents[i] for i in self.results])

    def plan(self, platform: str) -> xla.Plan | None:
        return self.definition.plan(platform, self.asked)

    def is_python(self, platform: str) -> bool:
        return self.definition.is_python(platform, self.asked)

    def launch(self, plan: xla.Plan, run: xla.Run, args: Sequence[Any]) -> Sequence[Any]:
        inner, batching, avals = self.call.axes, self.definition.batching, self.definition.input_avals
        sizes = (*self.axes.sizes, *inner.sizes)
        num_inputs = len(avals)
        # A cotangent has the axes of its result: that of a sum is a constant, which no map touches.
        first = num_inputs + len(self.definition.result_avals)
        outer, args = list(self.axes.operands), list(args)
        for i in range(self.definition.num_results):
            both = zip(outer[first + i], outer[num_inputs + i], strict=True)
            has = tuple(own or of_result for own, of_result in both)
            args[first + i] = _axes.extended(args[first + i], outer[first + i], has, self.axes.sizes)
            outer[first + i] = has
        inner_has = [*inner.operands, *[(True,) * len(inner.sizes)] * (len(args) - num_inputs)]
        has = [(*around, *own) for around, own in zip(outer, inner_has, strict=True)]
        operands = _batching.arrange(batching, self.names, args, has, sizes)

        # The axes that each gradient has. One that has none of them is summed by the kernel; one that has some, here.
        kept = [(*(True,) * len(self.axes.sizes), *inner.operands[i]) for i in self.asked]
        front = _batching.leading(batching, sizes)
        outs = run(
            *operands,
            result_avals=[
                avals[i].update(shape=(*(front if True in axes else ()), *avals[i].shape))
                for i, axes in zip(self.asked, kept, strict=True)
            ],
        )
        return [
            _axes.summed(out.reshape(*sizes, *avals[i].shape), axes) if True in axes else out
            for out, i, axes in zip(outs, self.asked, kept, strict=True)
        ]


def _present(sizes: Sequence[int], has: Sequence[bool]) -> tuple[int, ...]:
    return tuple(size for size, has_it in zip(sizes, has, strict=True) if has_it)
