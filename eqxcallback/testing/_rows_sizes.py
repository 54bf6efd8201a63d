"""Batches of sizes that kernels forget: none, one, and what no block divides."""

import jax

from ._findings import Findings
from ._rows_programs import first_batched, over_batch
from ._subject import Subject


_ODD_SIZES = (1, 7, 17)


def zero_size(subject: Subject, findings: Findings) -> None:
    """A batch of no examples, over which gradients of shared arrays are zero."""
    _of_size(subject, findings, 0)


def odd_shapes(subject: Subject, findings: Findings) -> None:
    """Batches of odd sizes."""
    for size in _ODD_SIZES:
        _of_size(subject, findings, size)


def _of_size(subject: Subject, findings: Findings, size: int) -> None:
    where, is_mapped = first_batched(subject)
    in_axes = tuple(0 if it else None for it in is_mapped)
    function = jax.vmap(subject.call, in_axes=in_axes, axis_size=size)
    over_batch(subject, findings, f"{size} examples, {where}", function, is_mapped, size)
