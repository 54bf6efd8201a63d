"""One call of an op in a program, and its rules under transformations."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.tree_util import tree_leaves, tree_unflatten

from .. import backends, xla
from . import _batching
from ._options import Options


if TYPE_CHECKING:
    from ._op import Op


@dataclasses.dataclass(frozen=True)
class Call:
    """What the primitive of an op calls.

    **Attributes:**

    - `names`: for each flat operand, the parameter that it belongs to.
    - `aliases`: for each platform with a kernel, pairs of flat operand and result indices.
    - `example_avals`: of the flat results of one example.
    - `batch_shape`: the sizes of the axes that `vmap` has added, the outermost first.
    - `depths`: how many of them each flat operand has: the innermost ones.
    """

    op: "Op"
    options: Options
    in_tree: Any
    names: tuple[str, ...]
    aliases: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]
    example_avals: tuple[Any, ...]
    batch_shape: tuple[int, ...]
    depths: tuple[int, ...]

    def __repr__(self) -> str:
        options = f"({self.options!r})" if self.options.values else ""
        return f"{self.op.name}{options}"

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.op.name, self.options, self.in_tree, self.example_avals, self.batch_shape, self.depths))

    def __hash__(self) -> int:  # computed once
        return self._hash

    @property
    def result_avals(self) -> Sequence[Any]:
        return [aval.update(shape=(*self.batch_shape, *aval.shape)) for aval in self.example_avals]

    def reference(self, *args: Any) -> Sequence[Any]:
        function = self.op.reference
        if function is None:
            raise ValueError(
                f"Op({self.op.name}): there is no reference, so it has no derivative, and no value on a platform without a "
                f"kernel (there are kernels for {', '.join(self.op.kernels)}). Give the Op a reference, or a kernel."
            )

        def flat(*args: Any) -> Sequence[Any]:
            return tree_leaves(function(*tree_unflatten(self.in_tree, args), **self.options.values))

        mapped = flat
        for level, size in enumerate(reversed(self.batch_shape)):
            in_axes = tuple(0 if depth > level else None for depth in self.depths)
            mapped = jax.vmap(mapped, in_axes=in_axes, axis_size=size)
        return mapped(*args)

    def plan(self, platform: str) -> xla.LaunchPlan | None:
        kernels: Mapping[str, Any] = self.op.kernels
        if platform not in kernels:
            return None
        aliases = dict(self.aliases)[platform]
        return backends.prepare(kernels[platform], platform, self.options.values, aliases, self.op.name)

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        active = [index for index, tangent in enumerate(tangents) if tangent is not None]

        def of_active(*values: Any) -> Sequence[Any]:
            merged = list(primals)
            for index, value in zip(active, values, strict=True):
                merged[index] = value
            return self.reference(*merged)

        _, out = jax.jvp(of_active, [primals[i] for i in active], [tangents[i] for i in active])
        return [None if tangent.dtype == jax.dtypes.float0 else tangent for tangent in out]

    def batch(
        self, bind: xla.Bind, args: Sequence[Any], dims: Sequence[int | None]
    ) -> tuple[Sequence[Any], Sequence[int]]:
        return _batching.batch(self, bind, args, dims)
