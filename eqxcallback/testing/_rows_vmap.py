"""Calls under `vmap` are the calls for each example."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ..core import Value
from ._findings import Findings, NotApplicable, host
from ._subject import Subject


_SIZE = 3
_MOST_ALONE = 8  # operands that are mapped one at a time: each costs a compilation


def vmap(subject: Subject, findings: Findings) -> None:
    """Each array alone, along each kind of axis; the others are not mapped."""
    operands = subject.operands
    _need_arrays(subject)
    for i, operand in list(enumerate(operands))[:_MOST_ALONE]:
        for axis in dict.fromkeys((0, -1, 1 if operand.ndim > 1 else -1)):
            in_axes: list[int | None] = [None] * len(operands)
            in_axes[i] = axis
            mapped(subject, findings, f"{operand.name} mapped along axis {axis}", in_axes, _SIZE)
    if len(operands) > _MOST_ALONE:
        findings.notes.append(f"the first {_MOST_ALONE} of {len(operands)} arrays")


def vmap_all(subject: Subject, findings: Findings) -> None:
    """All arrays, in and out along other axes, eager and compiled; also what is usual: arguments alone, or an ensemble."""
    operands = subject.operands
    _need_arrays(subject)
    mapped(subject, findings, "all mapped along axis 0", [0] * len(operands), _SIZE, compiled=True)
    mapped(subject, findings, "all mapped along the last axis", [-1] * len(operands), _SIZE, out_axes=-1)
    for where, is_mapped in subject.batched:
        if not all(is_mapped):
            mapped(subject, findings, where, [0 if it else None for it in is_mapped], _SIZE)
            # With all arrays mapped alone, this is an ensemble: the layers are mapped, the arguments are not.
            mapped(subject, findings, f"all but {where}", [None if it else 0 for it in is_mapped], _SIZE)


def vmap_nested(subject: Subject, findings: Findings) -> None:
    """Two maps of different sizes, around the same arrays and around different ones."""
    count = len(subject.operands)
    _need_arrays(subject)
    everything, nothing = [True] * count, [False] * count
    cases = [("both map all", everything, everything)]
    for where, is_mapped in subject.batched[:2]:
        others = [not it for it in is_mapped]
        if is_mapped not in (everything, nothing):
            cases.append((f"inner: {where}; outer: the others", others, is_mapped))
            cases.append((f"inner: the others; outer: {where}", is_mapped, others))
            cases.append((f"inner: all; outer: {where}", is_mapped, everything))
    for where, outer, inner in cases:
        with findings.case(where):
            _nested(subject, findings, where, outer, inner, (2, _SIZE))


def mapped(
    subject: Subject,
    findings: Findings,
    where: str,
    in_axes: Sequence[int | None],
    size: int,
    *,
    out_axes: int = 0,
    compiled: bool = False,
) -> None:
    """One `vmap`, eager or also compiled, against calls for each example."""
    with findings.case(where):
        examples = [
            [operand.example(number if axis is not None else 0) for operand, axis in pairs(subject, in_axes)]
            for number in range(size)
        ]
        arrays = [
            operand.array() if axis is None else operand.stack([example[i] for example in examples], axis)
            for i, (operand, axis) in enumerate(pairs(subject, in_axes))
        ]
        function = jax.vmap(subject.call, in_axes=tuple(in_axes), out_axes=out_axes, axis_size=size)
        got = _in_front(function(*arrays), out_axes)
        for name, reference in subject.references:
            findings.close(got, expected(subject, reference, examples), f"{where}, against {name}")
        if compiled:
            findings.close(_in_front(jax.jit(function)(*arrays), out_axes), got, f"{where}, compiled against eager")


def expected(subject: Subject, reference: Any, examples: Sequence[Sequence[Any]]) -> list[np.ndarray]:
    """The results of `reference` for each example, stacked."""
    rows = [reference(*map(_array, subject.operands, example)) for example in examples]
    return [
        np.stack([host(row[i]) for row in rows]) if rows else np.zeros((0, *result.shape), result.dtype)
        for i, result in enumerate(subject.result_types)
    ]


def pairs(subject: Subject, axes: Sequence[object]) -> list[tuple[Any, Any]]:
    return list(zip(subject.operands, axes, strict=True))


def _nested(
    subject: Subject,
    findings: Findings,
    where: str,
    outer: Sequence[bool],
    inner: Sequence[bool],
    sizes: tuple[int, int],
) -> None:
    """The outer axis is in front, the inner one is the last."""

    def value(k: int, i: int, j: int) -> np.ndarray:
        return subject.operands[k].example((i * sizes[1] if outer[k] else 0) + (j if inner[k] else 0))

    arrays = []
    for k, operand in enumerate(subject.operands):
        rows = [
            np.stack([value(k, i, j) for j in range(sizes[1])], operand.ndim) if inner[k] else value(k, i, 0)
            for i in range(sizes[0])
        ]
        arrays.append(operand.array(np.stack(rows) if outer[k] else rows[0]))
    by_inner = jax.vmap(
        subject.call, in_axes=tuple(subject.operands[k].ndim if it else None for k, it in enumerate(inner)), axis_size=3
    )
    function = jax.vmap(by_inner, in_axes=tuple(0 if it else None for it in outer), axis_size=sizes[0])
    # Not -1, which nothing tells if there are no elements.
    got = [out.reshape(sizes[0] * sizes[1], *out.shape[2:]) for out in map(host, function(*arrays))]
    examples = [
        [value(k, i, j) for k in range(len(subject.operands))] for i in range(sizes[0]) for j in range(sizes[1])
    ]
    for name, reference in subject.references:
        findings.close(got, expected(subject, reference, examples), f"{where}, against {name}")


def _in_front(outs: Sequence[Value], axis: int) -> list[np.ndarray]:
    # `axis` is one of `out`: on the host, a typed key has one more, the words.
    return [np.moveaxis(host(out), axis % out.ndim, 0) for out in outs]


def _array(operand: Any, value: np.ndarray) -> jax.Array:
    return operand.array(value)


def _need_arrays(subject: Subject) -> None:
    if not subject.operands:
        raise NotApplicable("no arrays to map")
