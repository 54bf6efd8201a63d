"""One call of an op in a program."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from .. import xla
from . import _batching
from ._axes import Axes, present
from ._flat_call import FlatCall
from ._tangent import Tangent


@dataclasses.dataclass(frozen=True, repr=False)
class Call(FlatCall):
    """The kernel, or the reference where there is none. Its results are those of the op, then the residuals."""

    __hash__ = FlatCall.__hash__

    @property
    def example_avals(self) -> Sequence[Any]:
        return self.definition.result_avals

    @property
    def names(self) -> Sequence[str]:
        return self.definition.names

    @property
    def has_side_effect(self) -> bool:
        return self.definition.has_side_effect

    @property
    def has_kernel(self) -> bool:
        return bool(self.definition.forward)

    @property
    def factors(self) -> xla.Factors:
        own, axes = self.definition.factors, self.axes
        all_axes = axes.dims((True,) * len(axes.sizes))
        operands = tuple((*axes.dims(has), *dims) for has, dims in zip(axes.operands, own.operands, strict=True))
        return xla.Factors(operands, tuple((*all_axes, *dims) for dims in own.results))

    def part(self, shapes: Sequence[Sequence[int]]) -> "Call":
        sizes = self.factors.sizes(shapes)
        own = [shape[sum(has) :] for shape, has in zip(shapes, self.axes.operands, strict=True)]
        local = tuple(sizes[f"vmap{i}"] for i in range(len(self.axes.sizes)))
        return Call(self.definition.part(own), Axes(local, self.axes.operands))

    def example(self, *args: Any) -> Sequence[Any]:
        definition = self.definition
        if definition.reference is None:
            raise ValueError(definition.no_reference)
        # Residuals are for a kernel that will not run here either.
        residuals = definition.result_avals[definition.num_results :]
        return [*definition.reference(*args), *(jnp.zeros(aval.shape, aval.dtype) for aval in residuals)]

    def plan(self, platform: str) -> xla.Plan | None:
        return self.definition.plan(platform) if self.runs_kernel else None

    def is_python(self, platform: str) -> bool:
        return self.runs_kernel and self.definition.is_python(platform)

    @functools.cached_property
    def runs_kernel(self) -> bool:
        """Where there is one: what `when` says of the operands as it would take them."""
        definition, axes = self.definition, self.axes
        if definition.when is None:
            return True
        operands = [
            jax.ShapeDtypeStruct((*present(axes.sizes, has), *aval.shape), aval.dtype)
            for has, aval in zip(axes.operands, definition.input_avals, strict=True)
        ]
        if not axes.sizes:
            return definition.when(operands)
        with jax.enable_x64(True):  # types are what they are, also where the rest of the program has no such
            return definition.when(
                jax.eval_shape(
                    lambda *args: _batching.arrange(definition.batching, self.names, args, axes.operands, axes.sizes),
                    *operands,
                )
            )

    def launch(self, plan: xla.Plan, run: xla.Run, args: Sequence[Any]) -> Sequence[Any]:
        batching, axes = self.definition.batching, self.axes
        if not axes.sizes:
            return run(*args, result_avals=self.example_avals)
        aliased = frozenset(i for i, _ in plan.aliases)
        operands = _batching.arrange(batching, self.names, args, axes.operands, axes.sizes, aliased)
        front = _batching.leading(batching, axes.sizes)
        outs = run(*operands, result_avals=[aval.update(shape=(*front, *aval.shape)) for aval in self.example_avals])
        return [out.reshape(aval.shape) for out, aval in zip(outs, self.result_avals, strict=True)]

    def jvp(self, primals: Sequence[Any], outs: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        definition = self.definition
        active = tuple(i for i, tangent in enumerate(tangents) if tangent is not None)
        tangent = Tangent.of(self, active)
        if not tangent.example_avals:
            return [None] * len(outs)
        if definition.reference is None and definition.jvp is None and definition.backward is None:
            raise ValueError(definition.no_reference)
        operands = [*primals, *(outs if definition.reads_results else ()), *(tangents[i] for i in active)]
        # With a backward kernel the tangents are a call of their own, which becomes that kernel when it is transposed.
        bind = tangent.reference if definition.backward is None else lambda *args: xla.op_call(tangent, *args)
        found = iter(bind(*operands))
        return [next(found) if i in tangent.results else None for i in range(len(outs))]

    def differentiable(self, results: Sequence[int]) -> Callable[..., Sequence[Any]]:
        """`results` as a function in pure JAX that has the right derivatives, and, with a rule of its own, those alone."""
        own_rule = self.definition.jvp
        if own_rule is None:
            return lambda *args: [self.reference(*args)[i] for i in results]

        @jax.custom_jvp
        def example(*args: Any) -> Sequence[Any]:
            avals = [self.example_avals[i] for i in results]
            return xla.vary_like([jnp.zeros(aval.shape, aval.dtype) for aval in avals], args)

        def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
            is_zero = [isinstance(tangent, SymbolicZero) for tangent in tangents]
            found = own_rule(primals, [None if zero else t for t, zero in zip(tangents, is_zero, strict=True)])
            return example(*primals), xla.vary_like([found[i] for i in results], primals)

        example.defjvp(rule, symbolic_zeros=True)
        return self.axes.mapped(example)

    def batch(self, args: Sequence[Any], dims: Sequence[int | None]) -> tuple[Sequence[Any], Sequence[int]]:
        if self.definition.batch is not None and not self.axes.sizes and not self.definition.num_residuals:
            (size,) = {arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None}
            found = self.definition.batch(size, xla.mapped_first(args, dims), [dim is not None for dim in dims])
            if found is not None:
                outs, is_mapped = found
                missing = [not mapped for mapped in is_mapped]
                return [
                    jnp.broadcast_to(out, (size, *out.shape)) if lacks else out
                    for out, lacks in zip(outs, missing, strict=True)
                ], [0] * len(outs)
        return super().batch(args, dims)
