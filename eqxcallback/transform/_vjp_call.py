"""The backward kernel of an op, and what it is in pure JAX."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax

from .. import xla
from ..core import Aval, Size, Value
from . import _axes, _batching
from ._axes import Axes, Has
from ._choice import Choice
from ._flat_call import FlatCall, LinearCall, around, of_some


if TYPE_CHECKING:
    from ._forward_call import ForwardCall
    from ._jvp_call import JvpCall


@dataclasses.dataclass(frozen=True, repr=False)
class VjpCall(LinearCall):
    """The gradients of a call. Its operands are those of the op's call, its saved results, and the cotangents of the results that
    callers see. Its results are the gradients of the operands `needs_grad`, summed over the axes that these lack in the
    call. `results` are the results of floating type.
    """

    call: "ForwardCall"
    needs_grad: tuple[int, ...]
    results: tuple[int, ...]

    __hash__ = FlatCall.__hash__

    @classmethod
    def of(cls, tangent: "JvpCall", needs_grad: tuple[int, ...]) -> "VjpCall":
        """Transpose `tangent`, with its axes."""
        outer, num_results = tangent.axes, tangent.bound.num_results
        primals = outer.operands[: len(outer.operands) - len(tangent.active)]
        axes = Axes(outer.sizes, (*primals, *[(True,) * len(outer.sizes)] * num_results))
        return cls(tangent.bound, axes, tangent.call, needs_grad, tangent.results)

    def __repr__(self) -> str:
        return f"{self.call!r}.vjp"

    @property
    def example_avals(self) -> Sequence[Aval]:
        inner, avals = self.call.axes, self.bound.input_avals
        return [
            avals[i].update(shape=(*_axes.present(inner.sizes, inner.operands[i]), *avals[i].shape))
            for i in self.needs_grad
        ]

    @property
    def names(self) -> Sequence[str]:
        return [*self.bound.names, *[""] * (len(self.axes.operands) - len(self.bound.names))]

    @property
    def description(self) -> str:
        return f"{super().description} {self.needs_grad}"

    @property
    def factors(self) -> xla.Factors:
        inner, num_results = self.call.factors, self.bound.num_results
        saved = inner.results[: len(self.bound.saved_avals)]
        operands = [*inner.operands, *saved, *inner.results[:num_results]]
        factors = around(self.axes, operands, [inner.operands[i] for i in self.needs_grad])
        return dataclasses.replace(factors, sums=True)

    def part(self, shapes: Sequence[Sequence[Size]]) -> "VjpCall":
        sizes = self.factors.sizes(shapes)
        count = len(self.bound.input_avals)
        operand_shapes = [shape[sum(has) :] for shape, has in zip(shapes, self.axes.operands, strict=True)][:count]
        axes = Axes(tuple(sizes[f"outer{i}"] for i in range(len(self.axes.sizes))), self.axes.operands)
        inner_sizes = tuple(sizes[f"vmap{i}"] for i in range(len(self.call.axes.sizes)))
        examples = [shape[sum(has) :] for shape, has in zip(operand_shapes, self.call.axes.operands, strict=True)]
        bound = self.bound.part(examples)
        call = dataclasses.replace(self.call, bound=bound, axes=Axes(inner_sizes, self.call.axes.operands))
        return dataclasses.replace(self, bound=bound, axes=axes, call=call)

    def example(self, *args: Value) -> Sequence[Value]:
        def of(function: Callable[..., Sequence[Value]]) -> Callable[..., Sequence[Value]]:
            def pulled(*args: Value) -> Sequence[Value]:
                primals, _, cotangents = self.split(args)
                function_of_some = of_some(function, primals, self.needs_grad)
                _, pullback = jax.vjp(function_of_some, *(primals[i] for i in self.needs_grad))
                return list(pullback([cotangents[i] for i in self.results]))

            return pulled

        return self.call.derivatives(of, *args, results=self.results)

    def _choice(self, platform: str, *, anywhere: bool) -> Choice:
        """A kernel runs only where one did forward, whose operands it supports as well."""
        bound, forward = self.bound, self._forward
        if bound.backward is None:
            return Choice(None)
        ran = forward._choice(platform, anywhere=True) if anywhere else forward.choice(platform)
        if ran.kernel is None:
            return Choice(None, ran.reasons or (("forward", "the reference ran"),))
        if self._has_one_for_each_example:
            reason = "a parameter that the kernel sees once has a gradient for each example"
            return Choice(None, (("vmap", reason),))
        candidates = bound.backward(self.needs_grad).get(platform, ())
        return bound.choose(candidates, forward.kernel_shapes, platform, anywhere=anywhere)

    @functools.cached_property
    def _forward(self) -> "ForwardCall":
        """The call whose results it has, with all axes that its results have."""
        outer, inner = self.axes, self.call.axes
        primals = outer.operands[: len(inner.operands)]
        levels = [i for i, has in enumerate(self._result_axes) if has]
        operands = zip(primals, inner.operands, strict=True)
        axes = Axes(
            (*(outer.sizes[i] for i in levels), *inner.sizes),
            tuple((*(has[i] for i in levels), *inside) for has, inside in operands),
        )
        return dataclasses.replace(self.call, axes=axes)

    @property
    def _result_axes(self) -> Has:
        """Tell which axes the results of the call have: the axes of any of its operands."""
        primals = self.axes.operands[: len(self.bound.input_avals)]
        return tuple(any(has[i] for has in primals) for i in range(len(self.axes.sizes)))

    @property
    def _has_one_for_each_example(self) -> bool:
        """True if a parameter that a kernel sees once needs a gradient for each example. The reference computes it then."""
        batching, names = self.bound.batching, self.bound.names
        if not self.axes.sizes or self.bound.reference is None:
            return False
        return any(_batching.is_of_one(batching, names[i]) for i in self.needs_grad)

    def _without_ignored(self, args: Sequence[Value], axes: Sequence[Sequence[bool]]) -> list[Value]:
        """Put, in the place of an operand that the kernel does not read, one of the same type that is kept anyway."""
        names, num_inputs = self.bound.names, len(self.bound.input_avals)
        labels = [*names, *range(len(args) - num_inputs)]
        ignored = self.bound.ignored(frozenset(names[i] for i in self.needs_grad))
        read = [i for i in range(num_inputs, len(args)) if labels[i] not in ignored]

        def kept(i: int) -> int:
            same = (j for j in read if args[j].shape == args[i].shape and args[j].dtype == args[i].dtype)
            return next((j for j in same if axes[j] == axes[i]), i)

        num_primals = num_inputs + len(self.bound.saved_avals)
        return [args[kept(i)] if i < num_primals and labels[i] in ignored else args[i] for i in range(len(args))]

    def launch(self, lowering: xla.Lowering, run: xla.Run, args: Sequence[Value]) -> Sequence[Value]:
        inner, batching, avals = self.call.axes, self.bound.batching, self.bound.input_avals
        sizes = (*self.axes.sizes, *inner.sizes)
        num_inputs = len(avals)
        # A cotangent has the axes of its result: that of a sum is a constant, which no map touches.
        of_result = self._result_axes
        outer, args = list(self.axes.operands), list(args)
        for i in range(num_inputs + len(self.bound.saved_avals), len(args)):
            has = tuple(of_operand or other for of_operand, other in zip(outer[i], of_result, strict=True))
            args[i] = _axes.extended(args[i], outer[i], has, self.axes.sizes)
            outer[i] = has
        if not self.bound.reads_results:  # the kernel has operands for them all the same
            outer[num_inputs:], args[num_inputs:] = 2 * outer[num_inputs:], 2 * args[num_inputs:]
        args = self._without_ignored(args, outer)
        names = [*self.bound.names, *[""] * (len(args) - num_inputs)]
        inner_has = [*inner.operands, *[(True,) * len(inner.sizes)] * (len(args) - num_inputs)]
        has = [(*around, *inside) for around, inside in zip(outer, inner_has, strict=True)]

        # The axes that each gradient should have, and those that the kernel gives it.
        computed = lowering.options.gradients
        wanted = {i: (*(True,) * len(self.axes.sizes), *inner.operands[i]) for i in computed}
        # XLA's threads share the examples that have a gradient each, also where they share the operand.
        parts = [tuple(map(max, has_it, wanted.get(i, has_it))) for i, has_it in enumerate(has)]
        shared = _batching.of_threads(batching, names, parts, sizes)
        within = _axes.absent(shared)
        # The kernel sums a gradient that should have none; one that should have some is summed here.
        given = {i: (True in axes,) * sum(within) for i, axes in wanted.items()}
        if not isinstance(batching, str):
            # A gradient has the form of its operand, of which there is one for each gradient that is wanted.
            for i in self.needs_grad:
                if _batching.method_of(batching, names[i]) == "fold":
                    args[i], has[i] = _axes.extended(args[i], has[i], wanted[i], sizes), wanted[i]
            inner = [_axes.present(has_it, within) for has_it in has]
            forms = _batching.seen(batching, names, inner, _axes.present(sizes, within))
            given = {i: tuple(map(max, forms[i] or inner[i], _axes.present(wanted[i], within))) for i in computed}
        given = {i: _axes.merged(shared, inside) for i, inside in given.items()}
        call = _batching.Call(lowering, run, batching, names, has, sizes)
        outs = call.results(args, [avals[i] for i in given], list(given.values()), shared)
        gradients = dict(zip(given, outs, strict=True))
        return [_axes.reduced(gradients[i], given[i], wanted[i]) for i in self.needs_grad]
