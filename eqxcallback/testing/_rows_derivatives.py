"""Derivatives of one call."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import AnyNumber, Value
from ._differences import differences
from ._findings import Findings, NotApplicable, host
from ._operand import on_device
from ._subject import Subject, pullback, pushforward, quickly_compiled


GRADIENT_FACTOR = 4.0  # a gradient has about as many roundings again forward and back
SECOND_FACTOR = 16.0
_MOST_ALONE = 8


def grad(subject: Subject, findings: Findings) -> None:
    """Reverse mode is that of the reference, compiled and eager."""
    subject.need_reverse()
    if subject.reference is None:
        raise NotApplicable("no reference; see the finite differences")
    for number in range(2):
        arrays, cotangents = subject.arrays(number), subject.cotangents(number)
        want = subject.reference_pullback(arrays, cotangents)
        _each(subject, findings, subject.pullback(subject.arrays(number), cotangents), want, "compiled")
        if number == 0:
            _each(subject, findings, pullback(subject.call, subject.differentiable, arrays, cotangents), want, "eager")


def partial_grads(subject: Subject, findings: Findings) -> None:
    """The gradient of each array alone, and from the cotangent of each result alone."""
    subject.need_reverse()
    reference = subject.pullback if subject.reference is None else subject.reference_pullback
    want = reference(subject.arrays(), subject.cotangents())
    for i, index in list(enumerate(subject.differentiable))[:_MOST_ALONE]:
        name = subject.operands[index].name
        with findings.case(name):
            got = pullback(subject.call, [index], subject.arrays(), subject.cotangents())
            findings.close(got, [want[i]], f"the gradient of {name} alone", factor=GRADIENT_FACTOR)
    results = subject.cotangents()
    for i in range(len(results)) if len(results) > 1 else ():
        with findings.case(f"result {i}"):
            alone = [ct if j == i else on_device(np.zeros(ct.shape, ct.dtype)) for j, ct in enumerate(results)]
            want = reference(subject.arrays(), alone)
            # As a function of that result alone, the others' cotangents are symbolic zeros.
            got = _pullback_of_one(subject, i, subject.arrays(), results[i])
            _each(subject, findings, got, want, f"from the cotangent of result {i} alone")


def _pullback_of_one(subject: Subject, i: int, arrays: Sequence[Value], cotangent: Value) -> Sequence[Value]:
    def one(*operands: Value) -> Sequence[Value]:
        return [[out for out in subject.call(*operands) if jnp.issubdtype(out.dtype, jnp.inexact)][i]]

    return pullback(one, subject.differentiable, arrays, [cotangent])


def finite_differences(subject: Subject, findings: Findings) -> None:
    """The gradient is what differences of the call's values say, for each array in a random direction."""
    subject.need_reverse()
    smallest = min(subject.operands[i].value.dtype.itemsize for i in subject.differentiable)
    function, gradient = subject.jitted, subject.pullback
    if smallest < 4 or any(ct.dtype.itemsize < 4 for ct in subject.cotangents()):
        if subject.reference is None:
            raise NotApplicable("values of 16 bits are too coarse, and there is no reference to take in 32")
        findings.notes.append("of the reference in float32")
        subject = subject.cast(np.float32)
        function, gradient = subject.jitted_reference, subject.reference_pullback
    directions = subject.directions()
    for i, index in enumerate(subject.differentiable):
        name = subject.operands[index].name
        with findings.case(name):

            def along(value: np.ndarray, index: int = index) -> list[np.ndarray]:
                arrays = subject.arrays()
                arrays[index] = subject.operands[index].array(value)
                outs = function(*arrays)
                return [host(out) for out in outs if jnp.issubdtype(out.dtype, jnp.inexact)]

            slopes = differences(along, subject.operands[index].value, directions[i])
            cotangents = [
                on_device(np.where(slope.smooth, host(ct), np.zeros((), ct.dtype)))
                for slope, ct in zip(slopes, subject.cotangents(), strict=True)
            ]
            got = _inner([gradient(subject.arrays(), cotangents)[i]], [directions[i]])
            want = _inner(cotangents, [slope.value for slope in slopes])
            allowed = sum(
                float(np.sum(np.abs(host(ct)) * slope.allowed)) for ct, slope in zip(cotangents, slopes, strict=True)
            )
            rough = sum(int(np.sum(~slope.smooth)) for slope in slopes)
            # At a kink even a right gradient may be NaN: there the cotangent is zero, and the derivative may be infinite.
            findings.within(got, want, np.inf if rough and np.isnan(got) else allowed, f"the slope along {name}")
            if rough:
                findings.notes.append(f"{rough} elements are not smooth along {name}")


def jvp(subject: Subject, findings: Findings) -> None:
    """Forward mode is that of the reference; without one, what finite differences say."""
    subject.need_forward()
    compiled = jax.jit(functools.partial(pushforward, subject.call, subject.differentiable))
    tangents = subject.directions()
    if subject.reference is not None:
        reference = quickly_compiled(functools.partial(pushforward, subject.reference, subject.differentiable))
        _, want = reference(subject.arrays(), tangents)
        _, eager = pushforward(subject.call, subject.differentiable, subject.arrays(), tangents)
        findings.close(compiled(subject.arrays(), tangents)[1], want, "compiled", factor=GRADIENT_FACTOR)
        findings.close(eager, want, "eager", factor=GRADIENT_FACTOR)
        return
    if any(subject.operands[i].value.dtype.itemsize < 4 for i in subject.differentiable):
        raise NotApplicable("values of 16 bits are too coarse for differences, and there is no reference")
    for i, index in enumerate(subject.differentiable):
        alone = [d if j == i else np.zeros_like(d) for j, d in enumerate(tangents)]

        def along(value: np.ndarray, index: int = index) -> list[np.ndarray]:
            arrays = subject.arrays()
            arrays[index] = subject.operands[index].array(value)
            return [host(out) for out in subject.jitted(*arrays) if jnp.issubdtype(out.dtype, jnp.inexact)]

        slopes = differences(along, subject.operands[index].value, tangents[i])
        for out, slope in zip(compiled(subject.arrays(), alone)[1], slopes, strict=True):
            allowed = np.where(slope.smooth, slope.allowed, np.inf)
            findings.within(host(out), slope.value, allowed, f"the tangent along {subject.operands[index].name}")


def hessian(subject: Subject, findings: Findings) -> None:
    """The gradient of the gradient, forward over reverse and reverse over reverse, in a random direction."""
    subject.need_reverse()
    subject.need_forward()
    indices = subject.differentiable
    cotangents, directions = subject.cotangents(), subject.directions()

    def second(function: Any, arrays: Sequence[Value]) -> tuple[Sequence[Value], Sequence[Value]]:
        def gradient(*operands: Value) -> Sequence[Value]:
            return pullback(function, indices, operands, cotangents)

        _, forward = pushforward(gradient, indices, arrays, directions)
        return forward, pullback(gradient, indices, arrays, directions)

    forward, reverse = jax.jit(functools.partial(second, subject.call))(subject.arrays())
    if subject.reference is not None:
        want = quickly_compiled(functools.partial(second, subject.reference))(subject.arrays())
        for got, expected, mode in ((forward, want[0], "forward"), (reverse, want[1], "reverse")):
            _each(subject, findings, got, expected, f"{mode} over reverse", SECOND_FACTOR)
    if any(subject.operands[i].value.dtype.itemsize < 4 for i in indices):
        findings.notes.append("without differences: 16 bits are too coarse")
        return

    def along(step: np.ndarray) -> list[np.ndarray]:
        arrays = subject.arrays()
        for i, direction in zip(indices, directions, strict=True):
            operand = subject.operands[i]
            arrays[i] = operand.array(np.asarray(operand.value + step * direction, operand.value.dtype))
        return [host(gradient) for gradient in subject.pullback(arrays, cotangents)]

    zero = np.zeros((), np.finfo(subject.operands[indices[0]].value.dtype).dtype)
    slopes = differences(along, zero, np.ones_like(zero))
    for index, got, slope in zip(indices, forward, slopes, strict=True):
        allowed = np.where(slope.smooth, slope.allowed, np.inf)
        findings.within(
            host(got), slope.value, allowed, f"differences of the gradient of {subject.operands[index].name}"
        )


def _each(
    subject: Subject,
    findings: Findings,
    got: Sequence[Value],
    want: Sequence[Value],
    where: str,
    factor: AnyNumber = GRADIENT_FACTOR,
) -> None:
    for index, a, b in zip(subject.differentiable, got, want, strict=True):
        findings.close([a], [b], f"{where}: the gradient of {subject.operands[index].name}", factor=factor)


def _inner(a: Sequence[object], b: Sequence[object]) -> float:
    """Return the inner product, as JAX pairs cotangents and tangents."""
    return sum(
        float(np.real(np.sum(host(x).astype(complex) * host(y).astype(complex)))) for x, y in zip(a, b, strict=True)
    )
