"""An op for one type of arguments: everything flat, and made once."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import backends, xla
from ..core import Aval, Size, Value, warn_once
from ..kernel import JaxKernel, TypedKernel, anything
from . import _preference
from ._batching import Batching
from ._choice import Choice, Implementation, check_reason


Candidates = Mapping[str, tuple[backends.BoundKernel, ...]]
Reference = Callable[..., Sequence[Value]]


def differentiable(avals: Sequence[Aval]) -> tuple[int, ...]:
    """The indices of the types that are floating."""
    return tuple(i for i, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.inexact))


_ON_SIZES = "depends on sizes, and an exported program has symbols in their place"


def _why_not_here(kernel: Any) -> str | None:
    reason = backends.why_not_here(kernel)
    if reason is not None:
        warn_once(
            f"eqxcallback: {kernel.backend} kernels are passed over: {reason} Other kernels, or references, run in their place, "
            "and eqxcallback.inspect shows which."
        )
    return reason


def _text(bound: backends.BoundKernel) -> str:
    return f"{bound.kernel.backend} kernel {bound.name}"


@dataclasses.dataclass(frozen=True, eq=False)
class BoundOp:
    """Compares by `key`. All functions take and return flat arrays, of one example.

    **Attributes:**

    - `name`: of the op or layer; `who` with what it is, to begin an error.
    - `remedy`: what gives it a derivative.
    - `names`: for each operand, the parameter that it belongs to.
    - `input_avals`, `result_avals`: the types of one example. The last `num_residuals` results are for `backward` only.
    - `forward`: for each platform its kernels, the first choice first.
    - `backward`: the kernels of the gradients, for the indices of the operands that need one; `None` where there is none.
    - `types`: what `supports` of a kernel is called with, `(types, options)`, of the types of flat operands.
    - `implementation`: the kind of kernels that may run.
    - `reads_results`: whether `backward` reads the results of the call. If not, it is given the cotangents in their place.
    - `ignored`: the parameters, by name, and results, by number, that `backward` does not read for the gradients of parameters.
    - `reference`: the results in pure JAX, without residuals.
    - `differentiable`: for each platform, what is differentiated there in place of `reference`, with the kernels that it goes
        with, the first choice first.
    - `jvp`: the tangents of the results from the operands and their tangents, `None` where there is none.
    - `batch`: a batching rule of its own: `(axis_size, args, is_mapped) -> (results, is_mapped)`, axes in front. It returns
        `None` where it does not apply.
    - `sharding`: how one example may be split between devices. By default not at all.
    """

    key: Hashable
    name: str
    who: str
    remedy: str
    names: tuple[str, ...]
    input_avals: tuple[Aval, ...]
    result_avals: tuple[Aval, ...]
    forward: Candidates
    backward: Callable[[tuple[int, ...]], Candidates] | None
    types: Callable[[Sequence[Any]], tuple[Any, Mapping[str, Any]]]
    reference: Reference | None
    batching: Batching
    differentiable: Mapping[str, Sequence[tuple[backends.BoundKernel, Reference]]] = dataclasses.field(
        default_factory=dict
    )
    implementation: Implementation = "auto"
    num_residuals: int = 0
    jvp: Callable[..., Sequence[Value]] | None = None
    batch: Callable[..., Any] | None = None
    sharding: xla.Factors | None = None
    has_side_effect: bool = False
    reads_results: bool = True
    ignored: Callable[[frozenset[str]], Collection[str | int]] = lambda wanted: ()
    label: str = ""
    _lowerings: dict[Any, xla.PythonLowering] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self.key))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, BoundOp) and self.key == other.key)

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    @property
    def no_reference(self) -> str:
        if self.backward is not None:
            return (
                f"{self.who}: there is no reference, and `backward` is for the first derivative in reverse mode only: forward "
                f"mode and higher derivatives are those of a reference. {self.remedy}"
            )
        platforms = ", ".join(self.forward) or "no platform"
        return (
            f"{self.who}: there is no reference, so it has no derivative, and no value on a platform without a kernel (there "
            f"are kernels for {platforms}). {self.remedy}"
        )

    @property
    def needs_kernel(self) -> bool:
        """True if a kind of kernel was chosen, so that the reference takes the place of none."""
        return self.implementation not in ("auto", "reference")

    @property
    def num_results(self) -> int:
        """The number of results that callers see."""
        return len(self.result_avals) - self.num_residuals

    @property
    def saved_avals(self) -> tuple[Aval, ...]:
        """The types of the results that derivatives depend on."""
        return self.result_avals if self.reads_results else ()

    @property
    def factors(self) -> xla.Factors:
        if self.sharding is not None:
            return self.sharding
        return xla.Factors.whole(self.input_avals, self.result_avals)

    def part(self, shapes: Sequence[Sequence[Size]]) -> "BoundOp":
        """Return this op for operands of these shapes, which are parts of the present ones."""
        if [tuple(aval.shape) for aval in self.input_avals] == list(map(tuple, shapes)):
            return self
        sizes, whole = self.factors.sizes(shapes), self.factors.sizes([aval.shape for aval in self.input_avals])

        def of_part(name: str | None, size: Size) -> Size:
            if name is None or size == whole[name]:
                return size if name is None else sizes[name]
            return size // whole[name] * sizes[name]  # so many groups

        results = tuple(
            aval.update(shape=tuple(map(of_part, dims, aval.shape)))
            for aval, dims in zip(self.result_avals, self.factors.results, strict=True)
        )
        inputs = tuple(aval.update(shape=tuple(shape)) for aval, shape in zip(self.input_avals, shapes, strict=True))
        key = (self.key, tuple(map(tuple, shapes)))
        return dataclasses.replace(self, key=key, input_avals=inputs, result_avals=results, _lowerings=self._lowerings)

    def choose(
        self,
        candidates: Sequence[backends.BoundKernel],
        shapes: Callable[[frozenset[int]], Sequence[Sequence[Size]]],
        platform: str,
        implementation: Implementation = "auto",
        *,
        anywhere: bool,
    ) -> Choice:
        """The first of the kernels that supports a call with operands of these shapes, a function of the operands that a result
        overwrites; or of several, the one that was measured to be the fastest. Unless `anywhere`, one that was not chosen and
        cannot be compiled here is passed over.
        """
        may_be_measured = not anywhere and len(candidates) > 1 and _preference.may_be_measured(self.name)
        reasons, able = [], []
        for bound in candidates:
            reason = self._why_not(bound, shapes, implementation)
            if reason is None and implementation == "auto" and not anywhere:
                reason = _why_not_here(bound.kernel)
            if reason is None:
                able.append(bound)
                if not may_be_measured:
                    break
            else:
                reasons.append((_text(bound), reason))
        if len(able) > 1:
            winner = _preference.winner(self.name, platform, able, lambda: self._seen(able, shapes), self.who)
            if winner is None:
                return Choice(None)
            losers = [(_text(bound), "was measured, and lost") for bound in able[:winner]]
            return Choice(able[winner], (*reasons, *losers))
        return Choice(able[0] if able else None, tuple(reasons))

    def differentiable_on(
        self, platform: str, shapes: Callable[[frozenset[int]], Sequence[Sequence[Size]]]
    ) -> Reference | None:
        """Return what is differentiated on `platform` in place of the reference, if anything is."""
        if self.implementation == "reference":
            return None
        for bound, function in self.differentiable.get(platform, ()):
            if self._why_not(bound, shapes, "auto") is None:
                return function
        return None

    def _seen(
        self,
        candidates: Sequence[backends.BoundKernel],
        shapes: Callable[[frozenset[int]], Sequence[Sequence[Size]]],
    ) -> Any:
        """Return the types and the kernels that a choice depends on."""
        aliased = frozenset(i for bound in candidates for i, _ in bound.call.aliases)
        return self.types(self._structs(shapes(aliased))), [bound.key for bound in candidates]

    def _structs(self, shapes: Sequence[Sequence[Size]]) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(shape, aval.dtype) for shape, aval in zip(shapes, self.input_avals, strict=True)]

    def _why_not(
        self,
        bound: backends.BoundKernel,
        shapes: Callable[[frozenset[int]], Sequence[Sequence[Size]]],
        implementation: Implementation,
    ) -> str | None:
        kernel = bound.kernel
        if implementation not in ("auto", kernel.backend):
            return f'the call says implementation="{implementation}"'
        if kernel.only_if_chosen and self.implementation != kernel.backend:
            return f'runs only with implementation="{kernel.backend}"'
        if kernel.supports is anything and not isinstance(kernel, TypedKernel | JaxKernel):
            return None
        seen = shapes(frozenset(i for i, _ in bound.call.aliases))
        has_symbols = any(jax.export.is_symbolic_dim(dim) for shape in seen for dim in shape)
        if has_symbols and isinstance(kernel, TypedKernel):
            return f"what it is called with {_ON_SIZES}"
        types, options = self.types(self._structs(seen))
        try:
            reason = kernel.supports(types, **options)
        except jax.errors.InconclusiveDimensionOperation:
            return f"its `supports` {_ON_SIZES}"
        reason = check_reason(reason, f"{self.who}: `supports` of {bound.name}")
        if reason is None and has_symbols and isinstance(kernel, JaxKernel) and not bound.call.gradients:
            try:
                jax.eval_shape(functools.partial(kernel.function, **options), *types)
            except jax.errors.InconclusiveDimensionOperation:
                return f"its function {_ON_SIZES}"
        return reason

    def lowering(self, bound: backends.BoundKernel, platform: str) -> xla.Lowering:
        """A kernel, made runnable."""
        # Python's lowerings are the identity of the callable in programs; native ones look for a rebuilt library anew.
        key = (platform, bound.key)
        if key in self._lowerings:
            return self._lowerings[key]
        lowering = backends.prepare(bound, platform, self.name)
        if isinstance(lowering, xla.PythonLowering):
            self._lowerings[key] = lowering
        return lowering
