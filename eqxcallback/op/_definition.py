"""What an op is for one type of arguments: everything flat, and made once."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from .. import backends, xla
from ._batching import Batching


def differentiable(avals: Sequence[Any]) -> tuple[int, ...]:
    """Those of floating type."""
    return tuple(i for i, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.inexact))


@dataclasses.dataclass(frozen=True, eq=False)
class Definition:
    """Compares by `key`. All functions take and return flat arrays, of one example.

    **Attributes:**

    - `name`: of the op or layer; `who` with what it is, to begin an error.
    - `remedy`: what gives it a derivative.
    - `names`: for each operand, the parameter that it belongs to.
    - `input_avals`, `result_avals`: the types of one example. The last `num_residuals` results are for `backward` only.
    - `forward`: for each platform, the kernel.
    - `backward`: the kernel of the gradients, for a platform and the indices of the operands that want one. A kernel in Python
        computes these, any other those of all operands of floating type.
    - `reads_results`: whether `backward` reads the results of the call. If not, it is given the cotangents in their place.
    - `reference`: the results in pure JAX, without residuals.
    - `jvp`: the tangents of the results from the operands and their tangents, `None` where there is none.
    - `batch`: a batching rule of its own: `(axis_size, args, is_mapped) -> (results, is_mapped)`, axes in front. It returns
        `None` where it does not apply.
    - `sharding`: how one example may be split between devices. By default not at all.
    - `falls_back`: whether the reference runs where there is no kernel.
    - `when`: whether the kernel runs, of the types with which it would see the operands. By default it does.
    """

    key: Hashable
    name: str
    who: str
    remedy: str
    names: tuple[str, ...]
    input_avals: tuple[Any, ...]
    result_avals: tuple[Any, ...]
    forward: Mapping[str, backends.Implementation]
    backward: Callable[[str, tuple[int, ...]], backends.Implementation | None] | None
    reference: Callable[..., Sequence[Any]] | None
    batching: Batching
    num_residuals: int = 0
    jvp: Callable[..., Sequence[Any]] | None = None
    batch: Callable[..., Any] | None = None
    sharding: xla.Factors | None = None
    has_side_effect: bool = False
    falls_back: bool = True
    when: Callable[[Sequence[Any]], bool] | None = None
    reads_results: bool = True
    label: str = ""
    _plans: dict[Any, xla.PythonPlan] = dataclasses.field(default_factory=dict)
    _is_python: dict[Any, bool] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self.key))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Definition) and self.key == other.key)

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
    def differentiable(self) -> tuple[int, ...]:
        """The operands of floating type."""
        return differentiable(self.input_avals)

    @property
    def num_results(self) -> int:
        """Of those that callers see."""
        return len(self.result_avals) - self.num_residuals

    @property
    def saved_avals(self) -> tuple[Any, ...]:
        """Of the results that derivatives depend on."""
        return self.result_avals if self.reads_results else ()

    @property
    def factors(self) -> xla.Factors:
        if self.sharding is not None:
            return self.sharding
        return xla.Factors.whole(self.input_avals, self.result_avals)

    def part(self, shapes: Sequence[Sequence[int]]) -> "Definition":
        """Of operands of these shapes, which are parts of the own ones."""
        if [tuple(aval.shape) for aval in self.input_avals] == list(map(tuple, shapes)):
            return self
        sizes = self.factors.sizes(shapes)
        results = tuple(
            aval.update(shape=tuple(sizes.get(name or "", size) for name, size in zip(dims, aval.shape, strict=True)))
            for aval, dims in zip(self.result_avals, self.factors.results, strict=True)
        )
        inputs = tuple(aval.update(shape=tuple(shape)) for aval, shape in zip(self.input_avals, shapes, strict=True))
        key = (self.key, tuple(map(tuple, shapes)))
        return dataclasses.replace(self, key=key, input_avals=inputs, result_avals=results, _plans=self._plans)

    def plan(self, platform: str, asked: tuple[int, ...] | None = None) -> xla.Plan | None:
        """The kernel, or that of the gradients `asked`, and perhaps of others, made runnable."""
        # Python's plans are the identity of the callable in programs; native ones look for a rebuilt library anew.
        key = (platform, asked)
        if key in self._plans:
            return self._plans[key]
        found = self._implementation(platform, asked)
        if found is None and asked is None and not self.falls_back:
            raise ValueError(
                f"{self.who}: there is no kernel of the chosen implementation for {platform}, only for "
                f'{", ".join(self.forward)}. Choose another one, or "auto".'
            )
        plan = None if found is None else backends.prepare(found, platform, self.name)
        if isinstance(plan, xla.PythonPlan):
            self._plans[key] = plan
        return plan

    def is_python(self, platform: str, asked: tuple[int, ...] | None = None) -> bool:
        """Whether that kernel is one in Python. Asked in each eager call: nothing is prepared for it."""
        key = (platform, asked)
        if key not in self._is_python:
            found = self._implementation(platform, asked)
            self._is_python[key] = found is not None and found.body is not None
        return self._is_python[key]

    def _implementation(self, platform: str, asked: tuple[int, ...] | None) -> backends.Implementation | None:
        forward = self.forward.get(platform)
        # Where the reference ran, there are no residuals, and no results of the kernel's.
        if asked is None or forward is None:
            return forward
        return None if self.backward is None else self.backward(platform, asked)
