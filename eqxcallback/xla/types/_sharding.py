"""The ways to split an array of a call, and its present split: factors of dimensions, and the mesh axes that split them."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...core import Aval, Size


# One name for each dimension of an array. `None` where it must be whole.
Dims = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Factors:
    """Dimensions of operands and results with one name are split together, and each part of a call is a call. One that is a
    multiple of the others is split between the groups of its elements.

    **Attributes:**

    - `sums`: whether a result that lacks a factor is a sum over it.
    - `independent`: whether each operand stays split as it is, whatever the others are.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sums: bool = False
    independent: bool = False

    @classmethod
    def whole(cls, operands: Sequence[Aval], results: Sequence[Aval]) -> "Factors":
        """Return the factors of arrays of these types, of which none may be split."""
        sides = [tuple((None,) * len(aval.shape) for aval in side) for side in (operands, results)]
        return cls(sides[0], sides[1])

    @classmethod
    def as_they_are(cls, operands: Sequence[Aval]) -> "Factors":
        """Return the factors of operands of these types that stay split as they are, and of no results."""
        names = tuple(tuple(f"split{i}x{j}" for j in range(len(aval.shape))) for i, aval in enumerate(operands))
        return cls(names, (), independent=True)

    def sizes(self, shapes: Sequence[Sequence[Size]]) -> dict[str, Size]:
        """Return the size of each factor, from the shapes of operands."""
        sizes: dict[str, Size] = {}
        for dims, shape in zip(self.operands, shapes, strict=True):
            for name, size in zip(dims, shape, strict=True):
                # Symbolic ones may be compared for equality alone.
                if name is not None and (name not in sizes or (size != sizes[name] and size < sizes[name])):
                    sizes[name] = size
        return sizes


def no_mesh() -> Any:
    """A context in which types have no shardings: for what is true of shapes and dtypes, wherever the arrays lie."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def split(factors: Factors, specs: Sequence[Any], sizes: Mapping[str, Size], mesh: Any) -> dict[str, Any]:
    """The mesh axes of each factor: those of the first array that has any. A mesh axis splits one factor, evenly.

    **Arguments:** `specs` are of the operands, or of those and the results.
    """
    entries: dict[str, Any] = {}
    used: set[str] = set()
    arrays = [*factors.operands, *factors.results][: len(specs)]
    for dims, spec in zip(arrays, specs, strict=True):
        for name, entry in zip(dims, [*spec, *[None] * (len(dims) - len(spec))], strict=True):
            axes = _axes(entry)
            if name is None or name in entries or not axes or used & set(axes):
                continue
            parts = 1
            for axis in axes:
                parts *= mesh.shape[axis]
            if sizes.get(name, 0) % parts == 0 and sizes.get(name, 0) > 0:
                entries[name] = entry
                used |= set(axes)
    return entries


def even(spec: Any, shape: Sequence[int], mesh: Any) -> PartitionSpec:
    """`spec` without the axes that would split a dimension into unequal parts."""

    def parts(entry: Any) -> int:
        return math.prod(mesh.shape[axis] for axis in _axes(entry))

    return PartitionSpec(
        *(
            entry if _axes(entry) and size > 0 and size % parts(entry) == 0 else None
            for size, entry in zip(shape, [*spec, *[None] * (len(shape) - len(spec))], strict=True)
        )
    )


def spec_of(dims: Dims, splits: Mapping[str, object]) -> PartitionSpec:
    return PartitionSpec(*(None if name is None else splits.get(name) for name in dims))


def summed_axes(dims: Dims, splits: Mapping[str, object]) -> tuple[str, ...]:
    """The mesh axes of factors that an array lacks."""
    return tuple(axis for name, entry in splits.items() if name not in dims for axis in _axes(entry))


def named(mesh: Mesh, dims: Dims, splits: Mapping[str, object]) -> NamedSharding:
    return NamedSharding(mesh, spec_of(dims, splits))


def _axes(entry: Any) -> tuple[str, ...]:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (entry,)
