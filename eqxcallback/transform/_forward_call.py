"""One call of an op in a program."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from .. import xla
from ..core import Aval, Size, Value
from . import _batching
from ._axes import Axes
from ._choice import Choice
from ._flat_call import FlatCall
from ._jvp_call import JvpCall


@dataclasses.dataclass(frozen=True, repr=False)
class ForwardCall(FlatCall):
    """The kernel, or the reference where there is none. Its results are those of the op, then the residuals."""

    __hash__ = FlatCall.__hash__

    @property
    def example_avals(self) -> Sequence[Aval]:
        return self.bound.result_avals

    @property
    def names(self) -> Sequence[str]:
        return self.bound.names

    @property
    def has_side_effect(self) -> bool:
        return self.bound.has_side_effect

    @property
    def is_plain(self) -> bool:
        bound = self.bound
        own_rules = bound.backward is not None or bound.jvp is not None or bound.has_side_effect
        return bound.reference is not None and not own_rules and not self.has_kernel

    @property
    def factors(self) -> xla.Factors:
        inner, axes = self.bound.factors, self.axes
        all_axes = axes.dims((True,) * len(axes.sizes))
        operands = tuple((*axes.dims(has), *dims) for has, dims in zip(axes.operands, inner.operands, strict=True))
        return xla.Factors(operands, tuple((*all_axes, *dims) for dims in inner.results))

    def part(self, shapes: Sequence[Sequence[Size]]) -> "ForwardCall":
        sizes = self.factors.sizes(shapes)
        examples = [shape[sum(has) :] for shape, has in zip(shapes, self.axes.operands, strict=True)]
        local = tuple(sizes[f"vmap{i}"] for i in range(len(self.axes.sizes)))
        return ForwardCall(self.bound.part(examples), Axes(local, self.axes.operands))

    def example(self, *args: Value) -> Sequence[Value]:
        bound = self.bound
        if bound.reference is None:
            raise ValueError(bound.no_reference)
        # Rules of JAX get constants as it keeps them, which are NumPy's arrays and have no `at`.
        arrays = [arg if isinstance(arg, jax.Array) else jnp.asarray(arg) for arg in args]
        # Residuals are for a kernel that will not run here either.
        residuals = bound.result_avals[bound.num_results :]
        return [*bound.reference(*arrays), *(jnp.zeros(aval.shape, aval.dtype) for aval in residuals)]

    @property
    def differentiated_on(self) -> Mapping[str, Callable[..., Sequence[Value]]]:
        """The functions of one example that are differentiated in place of the reference, by the platforms that have such."""
        functions = {
            platform: self.bound.differentiable_on(platform, self.kernel_shapes)
            for platform in self.bound.differentiable
        }
        return {platform: function for platform, function in functions.items() if function is not None}

    def derivatives(
        self,
        make: Callable[[Callable[..., Sequence[Value]]], Callable[..., Sequence[Value]]],
        *args: Value,
        results: Sequence[int],
    ) -> Sequence[Value]:
        """Call what `make` makes of `results` as a function in pure JAX that has the right derivatives. It is another function
        where a platform has a better one than the reference.
        """

        def some_of(function: Callable[..., Sequence[Value]]) -> Callable[..., Sequence[Value]]:
            return make(self.axes.mapped(_picked(function, results)))

        return self._by_platform(make(self._differentiable(results)), some_of, args)

    def _by_platform(
        self,
        default: Callable[..., Sequence[Value]],
        make: Callable[[Callable[..., Sequence[Value]]], Callable[..., Sequence[Value]]],
        args: Sequence[Value],
    ) -> Sequence[Value]:
        """Call what `make` makes of the function that is differentiated on a platform, or else `default`."""
        by_platform = {platform: make(function) for platform, function in self.differentiated_on.items()}
        return jax.lax.platform_dependent(*args, default=default, **by_platform) if by_platform else default(*args)

    def reference(self, *args: Value) -> Sequence[Value]:
        """A function that a platform has for derivatives takes its place where operands are mapped that no kernel takes so."""
        of_one = super().reference
        return self._by_platform(of_one, self.axes.mapped, args) if self._is_mapped_by_jax else of_one(*args)

    @property
    def _is_mapped_by_jax(self) -> bool:
        batching, operands = self.bound.batching, zip(self.names, self.axes.operands, strict=True)
        return any(True in has and _batching.method_of(batching, name) == _batching.REFERENCE for name, has in operands)

    def _choice(self, platform: str, *, anywhere: bool) -> Choice:
        bound, axes = self.bound, self.axes
        for name, has in zip(self.names, axes.operands, strict=True):
            if True in has and _batching.is_of_one(bound.batching, name):
                return Choice(
                    None, (("vmap", f"a kernel takes {name or 'an operand'} for one example, and it is mapped"),)
                )
        candidates = bound.forward.get(platform, ())
        return bound.choose(candidates, self.kernel_shapes, platform, bound.implementation, anywhere=anywhere)

    def kernel_shapes(self, aliased: frozenset[int]) -> list[tuple[Size, ...]]:
        """Return the shapes of the operands as a kernel sees them."""
        shapes = [aval.shape for aval in self.bound.input_avals]
        axes = self.axes
        return _batching.arranged_shapes(self.bound.batching, self.names, shapes, axes.operands, axes.sizes, aliased)

    def check_supported(self) -> None:
        """Check that a kernel of the chosen implementation, if one was chosen, supports the call."""
        implementation = self.bound.implementation
        if not self.bound.needs_kernel or self.has_kernel:
            return
        reasons = [self.choice(platform).text_of(implementation) for platform in self.bound.forward]
        raise ValueError(
            f'{self.bound.name}: expected a call that implementation="{implementation}" supports; '
            f'{"; ".join(dict.fromkeys(filter(None, reasons)))}. Choose another implementation, or "auto".'
        )

    def lowering(self, platform: str) -> xla.Lowering | None:
        choice, bound = self.choice(platform), self.bound
        if choice.kernel is not None:
            return bound.lowering(choice.kernel, platform)
        if bound.needs_kernel:
            platforms = ", ".join(platform for platform in bound.forward if self.choice(platform).kernel is not None)
            why = choice.text_of(bound.implementation) or f"there is none for {platform}"
            raise ValueError(
                f"{bound.who}: there is no kernel of the chosen implementation for {platform}, only for "
                f'{platforms or "no platform"} ({why}). Choose another one, or "auto".'
            )
        if bound.reference is None and choice.reasons:
            raise ValueError(
                f"{bound.no_reference} Of the kernels for {platform}, none runs this call ({choice.text})."
            )
        return None

    def launch(self, lowering: xla.Lowering, run: xla.Run, args: Sequence[Value]) -> Sequence[Value]:
        batching, operands, sizes = self.bound.batching, self.axes.operands, self.axes.sizes
        aliased = frozenset(i for i, _ in lowering.options.aliases)
        shared = _batching.of_threads(batching, self.names, operands, sizes)
        given = [(True,) * len(sizes)] * len(self.example_avals)
        call = _batching.Call(lowering, run, batching, self.names, operands, sizes, aliased)
        return call.results(args, self.example_avals, given, shared)

    def jvp(self, primals: Sequence[Value], outs: Sequence[Value], tangents: Sequence[Value]) -> Sequence[Value]:
        bound = self.bound
        active = tuple(i for i, tangent in enumerate(tangents) if tangent is not None)
        tangent = JvpCall.of(self, active)
        if not tangent.example_avals:
            return [None] * len(outs)
        if bound.reference is None and bound.jvp is None and bound.backward is None:
            raise ValueError(bound.no_reference)
        operands = [*primals, *(outs if bound.reads_results else ()), *(tangents[i] for i in active)]
        # With a backward kernel the tangents are a call of their own, which becomes that kernel when it is transposed.
        bind = tangent.reference if bound.backward is None else lambda *args: xla.op_call(tangent, *args)
        computed = iter(bind(*operands))
        return [next(computed) if i in tangent.results else None for i in range(len(outs))]

    def _differentiable(self, results: Sequence[int]) -> Callable[..., Sequence[Value]]:
        """`results` as a function in pure JAX that has the right derivatives, and, with a rule of its own, those alone."""
        own_rule = self.bound.jvp
        if own_rule is None:
            return _picked(super().reference, results)

        @jax.custom_jvp
        def example(*args: Value) -> Sequence[Value]:
            avals = [self.example_avals[i] for i in results]
            return xla.vary_like([jnp.zeros(aval.shape, aval.dtype) for aval in avals], args)

        def rule(primals: Sequence[Value], tangents: Sequence[Value]) -> tuple[Sequence[Value], Sequence[Value]]:
            is_zero = [isinstance(tangent, SymbolicZero) for tangent in tangents]
            computed = own_rule(primals, [None if zero else t for t, zero in zip(tangents, is_zero, strict=True)])
            return example(*primals), xla.vary_like([computed[i] for i in results], primals)

        example.defjvp(rule, symbolic_zeros=True)
        return self.axes.mapped(example)

    def batch(self, args: Sequence[Value], dims: Sequence[int | None]) -> tuple[Sequence[Value], Sequence[int]]:
        if self.bound.batch is not None and not self.axes.sizes and not self.bound.num_residuals:
            (size,) = {arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None}
            result = self.bound.batch(size, xla.mapped_first(args, dims), [dim is not None for dim in dims])
            if result is not None:
                outs, is_mapped = result
                missing = [not mapped for mapped in is_mapped]
                return [
                    jnp.broadcast_to(out, (size, *out.shape)) if lacks else out
                    for out, lacks in zip(outs, missing, strict=True)
                ], [0] * len(outs)
        return super().batch(args, dims)


def _picked(function: Callable[..., Sequence[Value]], results: Sequence[int]) -> Callable[..., Sequence[Value]]:
    """Return some of the results of `function`, of one call: gradients of several calls are rounded before they are added."""

    def some(*args: Value) -> Sequence[Value]:
        outs = function(*args)
        return [outs[i] for i in results]

    return some
