"""Derivatives through programs that call it many times: `checkpoint`, `scan`, `vmap` of `grad` and `grad` of `vmap`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..core import Value
from ._findings import Findings, NotApplicable, host
from ._operand import on_device
from ._rows_derivatives import GRADIENT_FACTOR
from ._rows_vmap import expected
from ._subject import Function, Subject, is_inexact, pullback


SIZE = 3


def checkpoint(subject: Subject, findings: Findings) -> None:
    """The gradient through `jax.checkpoint`, which calls it again."""
    subject.need_reverse()
    arrays, cotangents = subject.arrays(), subject.cotangents()
    again = jax.checkpoint(subject.call)
    got = jax.jit(lambda arrays: pullback(again, subject.differentiable, arrays, cotangents))(arrays)
    for _, reference in subject.pullbacks:
        findings.close(got, reference(arrays, cotangents), "the gradient", factor=GRADIENT_FACTOR)


def scan(subject: Subject, findings: Findings) -> None:
    """Calls in the body of a loop, and the gradient through it."""

    def scanned(is_mapped: Sequence[bool]) -> Function:
        def function(*arrays: Value) -> Sequence[Value]:
            def body(carry: None, mapped: Sequence[object]) -> tuple[None, Any]:
                rest = iter(mapped)
                given = [next(rest) if it else array for it, array in zip(is_mapped, arrays, strict=True)]
                return carry, subject.call(*given)

            return jax.lax.scan(body, None, [a for a, it in zip(arrays, is_mapped, strict=True) if it])[1]

        return function

    where, is_mapped = first_batched(subject)
    over_batch(subject, findings, where, scanned(is_mapped), is_mapped, SIZE)


def grad_of_vmap(subject: Subject, findings: Findings) -> None:
    """Shared arrays have one gradient, the sum over the batch."""
    subject.need_reverse()
    first_batched(subject)
    for where, is_mapped in subject.batched:
        in_axes = tuple(0 if it else None for it in is_mapped)
        over_batch(subject, findings, where, jax.vmap(subject.call, in_axes=in_axes), is_mapped, SIZE)


def vmap_of_grad(subject: Subject, findings: Findings) -> None:
    """Shared arrays have a gradient for each example."""
    subject.need_reverse()
    first_batched(subject)
    for where, is_mapped in [*subject.batched, ("all mapped", [True] * len(subject.operands))]:
        with findings.case(where):
            examples = examples_of(subject, is_mapped, SIZE)
            cotangents = [subject.cotangents(number) for number in range(SIZE)]
            arrays = stacked(subject, is_mapped, examples)
            in_axes = [0 if it else None for it in is_mapped]
            one = lambda arrays, cotangents: pullback(subject.call, subject.differentiable, arrays, cotangents)
            got = jax.jit(jax.vmap(one, in_axes=(in_axes, 0)))(arrays, _stack(cotangents))
            for name, reference in subject.pullbacks:
                rows = [reference(*pair) for pair in zip(_arrays(subject, examples), cotangents, strict=True)]
                for i, index in enumerate(subject.differentiable):
                    leaf = subject.operands[index].name
                    want = [np.stack([host(row[i]) for row in rows])]
                    text = f"{where}, the gradient of {leaf} against {name}"
                    if not is_mapped[index]:
                        text += (
                            f" (a batch of {SIZE} in front, which {leaf} has not: a gradient for each example"
                            f"{', not their sum' if _is_sum(got[i], want[0]) else ''})"
                        )
                    findings.close([got[i]], want, text, factor=GRADIENT_FACTOR)


def _is_sum(got: Any, rows: np.ndarray) -> bool:
    """True if some example has the sum of all gradients."""
    with np.errstate(invalid="ignore"):  # infinities of both signs
        total = rows.sum(0)
    return any(np.allclose(row, total, 1e-2, 1e-2) for row in host(got)) and not np.allclose(rows, total, 1e-2, 1e-2)


def first_batched(subject: Subject) -> tuple[str, list[bool]]:
    if not subject.operands:
        raise NotApplicable("no arrays to map")
    return subject.batched[0]


def over_batch(
    subject: Subject,
    findings: Findings,
    where: str,
    function: Function,
    is_mapped: Sequence[bool],
    size: int,
    place: Callable[[Sequence[object], Sequence[bool]], Sequence[object]] = lambda arrays, _: arrays,
) -> None:
    """A program that takes operands with a batch in front, or shared, and returns results with a batch: its values and its
    gradient, where shared operands have the sum. `place` puts arrays on devices.
    """
    with findings.case(where):
        examples = examples_of(subject, is_mapped, size)
        arrays = place(stacked(subject, is_mapped, examples), is_mapped)
        got = jax.jit(function)(*arrays)
        for name, reference in subject.references:
            findings.close(got, expected(subject, reference, examples), f"{where}, against {name}")
        if not (subject.has_reverse and subject.differentiable and any(map(is_inexact, subject.result_types))):
            return
        cotangents = [subject.cotangents(number) for number in range(size)]
        batch = _stack(cotangents) if size else subject.cotangents(lead=(0,))
        batch = place(batch, [True] * len(batch))
        gradients = jax.jit(lambda arrays, batch: pullback(function, subject.differentiable, arrays, batch))(
            arrays, batch
        )
        for name, reference in subject.pullbacks:
            rows = [reference(*pair) for pair in zip(_arrays(subject, examples), cotangents, strict=True)]
            want = [
                _gathered(subject, index, is_mapped[index], [host(row[i]) for row in rows])
                for i, index in enumerate(subject.differentiable)
            ]
            findings.close(gradients, want, f"{where}, the gradient against {name}", factor=GRADIENT_FACTOR)


def _gathered(subject: Subject, index: int, is_mapped: bool, rows: Sequence[np.ndarray]) -> np.ndarray:
    """The gradients of examples, stacked, or summed where the operand is shared."""
    value = subject.operands[index].value
    wide = np.complex128 if value.dtype.kind == "c" else np.float64
    batch = np.stack(rows) if rows else np.zeros((0, *value.shape), value.dtype)
    with np.errstate(invalid="ignore"):  # infinities of both signs
        return batch if is_mapped else np.asarray(batch.astype(wide).sum(0)).astype(value.dtype)


def examples_of(subject: Subject, is_mapped: Sequence[bool], size: int) -> list[list[np.ndarray]]:
    operands = list(zip(subject.operands, is_mapped, strict=True))
    return [[operand.example(number if it else 0) for operand, it in operands] for number in range(size)]


def stacked(subject: Subject, is_mapped: Sequence[bool], examples: Sequence[Sequence[np.ndarray]]) -> list[jax.Array]:
    return [
        operand.stack([example[i] for example in examples]) if is_mapped[i] else operand.array()
        for i, operand in enumerate(subject.operands)
    ]


def _stack(rows: Sequence[Sequence[object]]) -> list[jax.Array]:
    return [on_device([host(array) for array in column]) for column in zip(*rows, strict=True)]


def _arrays(subject: Subject, examples: Sequence[Sequence[np.ndarray]]) -> list[list[jax.Array]]:
    return [
        [operand.array(value) for operand, value in zip(subject.operands, example, strict=True)] for example in examples
    ]
