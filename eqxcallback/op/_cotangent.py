"""The backward kernel of an op, and what it is in pure JAX."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from .. import xla
from . import _axes, _batching
from ._axes import Axes, Has
from ._flat_call import FlatCall, LinearCall, around, of_some


if TYPE_CHECKING:
    from ._call import Call
    from ._tangent import Tangent


@dataclasses.dataclass(frozen=True, repr=False)
class Cotangent(LinearCall):
    """Its operands are those of the op's call, the results of it that are saved, and the cotangents of the results that callers
    see. Its results are the gradients of the operands `asked`, summed over the axes that these lack in the call. `results` are
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
        return [
            avals[i].update(shape=(*_axes.present(inner.sizes, inner.operands[i]), *avals[i].shape)) for i in self.asked
        ]

    @property
    def names(self) -> Sequence[str]:
        return [*self.definition.names, *[""] * (len(self.axes.operands) - len(self.definition.names))]

    @property
    def description(self) -> str:
        return f"{super().description} {self.asked}"

    @property
    def has_kernel(self) -> bool:
        return bool(self.definition.forward)

    @property
    def factors(self) -> xla.Factors:
        inner, num_results = self.call.factors, self.definition.num_results
        saved = inner.results[: len(self.definition.saved_avals)]
        own = [*inner.operands, *saved, *inner.results[:num_results]]
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
        return self.definition.plan(platform, self.asked) if self._may_run_kernel else None

    def is_python(self, platform: str) -> bool:
        return self._may_run_kernel and self.definition.is_python(platform, self.asked)

    @property
    def _may_run_kernel(self) -> bool:
        return self.runs_kernel and not self._has_one_for_each_example

    @functools.cached_property
    def runs_kernel(self) -> bool:
        """Whether the call did whose results it has."""
        outer, inner = self.axes, self.call.axes
        primals = outer.operands[: len(inner.operands)]
        levels = [i for i, has in enumerate(self._result_axes) if has]
        operands = zip(primals, inner.operands, strict=True)
        axes = Axes(
            (*(outer.sizes[i] for i in levels), *inner.sizes),
            tuple((*(has[i] for i in levels), *own) for has, own in operands),
        )
        return dataclasses.replace(self.call, axes=axes).runs_kernel

    @property
    def _result_axes(self) -> Has:
        """Which of the axes the results of the call have: those of any of its operands."""
        primals = self.axes.operands[: len(self.definition.input_avals)]
        return tuple(any(has[i] for has in primals) for i in range(len(self.axes.sizes)))

    @property
    def _has_one_for_each_example(self) -> bool:
        """Whether a parameter that a kernel sees once shall have a gradient for each example. Those are the reference's."""
        batching, names = self.definition.batching, self.definition.names
        if not self.axes.sizes or self.definition.reference is None or isinstance(batching, str):
            return False
        return "shared" in (batching.get(names[i]) for i in self.asked)

    def launch(self, plan: xla.Plan, run: xla.Run, args: Sequence[Any]) -> Sequence[Any]:
        inner, batching, avals = self.call.axes, self.definition.batching, self.definition.input_avals
        sizes = (*self.axes.sizes, *inner.sizes)
        num_inputs = len(avals)
        # A cotangent has the axes of its result: that of a sum is a constant, which no map touches.
        of_result = self._result_axes
        outer, args = list(self.axes.operands), list(args)
        for i in range(num_inputs + len(self.definition.saved_avals), len(args)):
            has = tuple(own or other for own, other in zip(outer[i], of_result, strict=True))
            args[i] = _axes.extended(args[i], outer[i], has, self.axes.sizes)
            outer[i] = has
        if not self.definition.reads_results:  # the kernel has operands for them all the same
            outer[num_inputs:], args[num_inputs:] = 2 * outer[num_inputs:], 2 * args[num_inputs:]
        names = [*self.definition.names, *[""] * (len(args) - num_inputs)]
        inner_has = [*inner.operands, *[(True,) * len(inner.sizes)] * (len(args) - num_inputs)]
        has = [(*around, *own) for around, own in zip(outer, inner_has, strict=True)]

        # The axes that each gradient shall have, and those that the kernel gives it.
        computed = self.asked if isinstance(plan, xla.PythonPlan) else self.definition.differentiable
        wanted = {i: (*(True,) * len(self.axes.sizes), *inner.operands[i]) for i in computed}
        if isinstance(batching, str):
            # One that shall have none is summed by the kernel; one that shall have some, here.
            given = {i: (True in axes,) * len(sizes) for i, axes in wanted.items()}
        else:
            # A gradient has the form of its operand, of which there is one for each that is wanted.
            for i in self.asked:
                if batching.get(names[i]) == "either":
                    args[i], has[i] = _axes.extended(args[i], has[i], wanted[i], sizes), wanted[i]
            given = dict(enumerate(_batching.seen(batching, names, has, sizes)))
            given |= {i: tuple(map(max, given[i], wanted[i])) for i in self.asked}
        operands = _batching.arrange(batching, names, args, has, sizes)
        outs = run(
            *operands,
            result_avals=[
                avals[i].update(shape=(*_batching.leading(batching, _axes.present(sizes, given[i])), *avals[i].shape))
                for i in computed
            ],
        )
        found = dict(zip(computed, outs, strict=True))
        return [
            _axes.reduced(found[i].reshape(*_axes.present(sizes, given[i]), *avals[i].shape), given[i], wanted[i])
            for i in self.asked
        ]
