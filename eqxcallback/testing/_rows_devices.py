"""Programs over several devices, and programs that leave the process."""

import pickle
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..core import Value
from ..kernel import Emulated
from ..program import export as export_program
from ._findings import Findings, NotApplicable
from ._rows_programs import first_batched, over_batch
from ._subject import Subject, is_native


_AXIS = "examples"


def sharded_jit(subject: Subject, findings: Findings) -> None:
    """A batch that is split over the devices, shared arrays on all of them; and each operand by itself, along each axis that they
    divide: what the subject says of its dimensions.
    """
    mesh, size = _mesh(subject)
    for where, is_mapped in subject.batched[:1]:
        in_axes = tuple(0 if it else None for it in is_mapped)
        over_batch(subject, findings, where, jax.vmap(subject.call, in_axes=in_axes), is_mapped, size, _placed_on(mesh))
    for i, operand in enumerate(subject.operands):
        for axis, length in enumerate(operand.value.shape[: operand.ndim]):
            if length and length % jax.device_count() == 0:
                with findings.case(f"{operand.name} split along axis {axis}"):
                    _split(subject, findings, i, axis, mesh)


def _split(subject: Subject, findings: Findings, index: int, axis: int, mesh: jax.sharding.Mesh) -> None:
    specs = [PartitionSpec() for _ in subject.operands]
    specs[index] = PartitionSpec(*[None] * axis, _AXIS)
    arrays = jax.device_put(subject.arrays(), [NamedSharding(mesh, spec) for spec in specs])
    got, where = subject.jitted(*arrays), f"{subject.operands[index].name} split along axis {axis}"
    for name, reference in subject.references:
        findings.close(got, reference(*subject.arrays()), f"{where}, against {name}")


def shard_map(subject: Subject, findings: Findings) -> None:
    """Each device calls it for its own part of the batch."""
    mesh, size = _mesh(subject)
    for where, is_mapped in subject.batched[:1]:
        in_axes = tuple(0 if it else None for it in is_mapped)
        specs = tuple(_spec(it) for it in is_mapped)
        mapped = jax.vmap(subject.call, in_axes=in_axes)
        function = jax.shard_map(mapped, mesh=mesh, in_specs=specs, out_specs=_spec(True))
        over_batch(subject, findings, where, function, is_mapped, size, _placed_on(mesh))


def export(subject: Subject, findings: Findings) -> None:
    """A program that was saved and loaded again."""
    if isinstance(subject.kernel, Emulated):
        raise NotApplicable("an emulated kernel stays in this process")
    if not is_native(subject.kernel):
        for function in subject.functions:
            if getattr(function, "__module__", "") == "__main__":
                raise NotApplicable(f"{function.__qualname__} is of the main program, which others cannot import")
            try:
                pickle.dumps(function)
            except Exception as error:
                raise NotApplicable(f"a kernel cannot be imported by name ({error})") from None
    exported = export_program(jax.jit(subject.call))(*subject.arrays())
    try:
        data = exported.serialize()
    except ImportError as error:
        raise NotApplicable(f"JAX cannot save programs here ({error})") from None
    loaded: Any = jax.export.deserialize(bytearray(data))
    findings.close(loaded.call(*subject.arrays()), subject.jitted(*subject.arrays()), "a loaded program")


def _mesh(subject: Subject) -> tuple[jax.sharding.Mesh, int]:
    """Return a mesh of all devices, and a size of batch that it divides."""
    first_batched(subject)
    count = jax.device_count()
    if count == 1:
        raise NotApplicable("one device")
    return jax.make_mesh((count,), (_AXIS,), axis_types=(AxisType.Auto,)), 2 * count


def _spec(is_mapped: bool) -> PartitionSpec:
    return PartitionSpec(_AXIS) if is_mapped else PartitionSpec()


def _placed_on(mesh: jax.sharding.Mesh) -> Any:
    def place(arrays: Sequence[Value], is_mapped: Sequence[bool]) -> Sequence[Value]:
        return [
            jax.device_put(array, NamedSharding(mesh, _spec(it))) for array, it in zip(arrays, is_mapped, strict=True)
        ]

    return place
