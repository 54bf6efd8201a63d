"""The same in other dtypes: a kernel computes right, or says that it does not take one."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.errors import JaxRuntimeError

from ..core import Value, raising
from ._findings import Findings, NotApplicable, error_text, host
from ._operand import CASTS, on_device
from ._rows_derivatives import GRADIENT_FACTOR
from ._subject import Subject, is_x64


# What native kernels raise for a dtype that they do not take.
_REFUSALS = ("INVALID_ARGUMENT", "UNIMPLEMENTED")


def dtypes(subject: Subject, findings: Findings) -> None:
    """All floating arrays, those of the layer too, in f16, bf16, f32 and f64."""
    floating = {operand.value.dtype.name for operand in subject.operands if operand.value.dtype.name in CASTS}
    if not floating:
        raise NotApplicable("no arrays of f16, bf16, f32 or f64")
    if subject.reference is None:
        raise NotApplicable("no reference")
    refused = []
    for name in CASTS:
        with findings.case(name), jax.enable_x64(name == "float64" or is_x64()):
            try:
                wanted = _reference(subject, name)
            except Exception as error:
                if name in floating:
                    raise
                findings.notes.append(f"the reference does not take {name} ({error_text(error)})")
                continue
            it = subject.cast(_dtype(name))
            values, gradients = wanted
            try:
                with raising():
                    got = [host(out) for out in it.jitted(*it.arrays())]
                    gradient = it.pullback(it.arrays(), it.cotangents()) if gradients else []
            except Exception as error:
                if name in floating or not _is_refusal(error):
                    raise
                refused.append(name)
                continue
            findings.close(got, values[0], name, slack=values[1])
            if gradients:
                findings.close(
                    gradient, gradients[0], f"{name}, the gradient", factor=GRADIENT_FACTOR, slack=gradients[1]
                )
    if refused:
        findings.notes.append(f"refused: {', '.join(refused)}")


def _reference(subject: Subject, name: str) -> tuple[Any, Any]:
    """Return the reference's values and gradients, and how far they are from the reference's in 32 bits."""
    it = subject.cast(_dtype(name))
    values = it.jitted_reference(*it.arrays())
    gradients = None
    try:
        it.need_reverse()
        gradients = it.reference_pullback(it.arrays(), it.cotangents())
    except NotApplicable:
        pass
    if _dtype(name).itemsize >= 4:
        return (values, None), gradients and (gradients, None)
    wide = it.cast(np.float32)
    pairs = [(values, wide.jitted_reference(*wide.arrays()))]
    if gradients is not None:
        cotangents = [
            on_device(host(ct).astype(other.dtype))
            for ct, other in zip(it.cotangents(), wide.cotangents(), strict=True)
        ]
        pairs.append((gradients, wide.reference_pullback(wide.arrays(), cotangents)))
    with_errors = [(narrow, _distance(narrow, exact)) for narrow, exact in pairs]
    return with_errors[0], with_errors[1] if len(with_errors) > 1 else None


def _distance(narrow: Sequence[Value], wide: Sequence[Value]) -> list[Any]:
    with np.errstate(invalid="ignore"):
        return [
            np.nan_to_num(np.abs(host(a).astype(np.complex128) - host(b).astype(np.complex128)), posinf=0.0)
            for a, b in zip(narrow, wide, strict=True)
        ]


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(jax.numpy, name))


def _is_refusal(error: Exception) -> bool:
    error = getattr(error, "original", error)
    if isinstance(error, JaxRuntimeError):
        return str(error).startswith(_REFUSALS)
    return isinstance(error, TypeError | ValueError)
