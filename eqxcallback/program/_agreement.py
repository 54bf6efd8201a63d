"""Tell results that differ by rounding from results that are wrong."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ..core import DType, PyTree


def host(results: PyTree) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(results)]


def is_finite(results: Sequence[np.ndarray]) -> bool:
    return all(bool(np.isfinite(_wide(leaf)).all()) for leaf in results)


def why_wrong(got: Sequence[np.ndarray], want: Sequence[np.ndarray], rtol: float | None, whose: str) -> str:
    """Return where results differ by more than rounding from those that are right, or `""`.

    **Arguments:**

    - `rtol`: the largest error, as a part of the largest value of an array. By default half of the digits that its dtype has,
        and in 16 bits a tenth: kernels sum in another order, and round more or less often. Integers are to be the same.
    - `whose`: the results that are right, in words.
    """
    for i, (a, b) in enumerate(zip(map(_wide, got), map(_wide, want), strict=True)):
        with np.errstate(invalid="ignore"):
            error = np.asarray(np.abs(a - b))
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        error = np.where(same, 0.0, np.where(np.isfinite(error), error, math.inf))
        wrong = error > _allowed(b, want[i].dtype, rtol)
        if wrong.any():
            at = tuple(int(j) for j in np.unravel_index(int(np.argmax(error)), error.shape))
            which = f" of result {i}" if len(want) > 1 else ""
            place = f" at {at}" if at else ""
            return (
                f"wrong results: {int(wrong.sum())} of {wrong.size} elements{which} differ from those of {whose}, "
                f"most{place}: got {got[i][at]}, expected {want[i][at]}"
            )
    return ""


def _allowed(want: np.ndarray, dtype: DType, rtol: float | None) -> float:
    if rtol == math.inf:
        return math.inf
    is_rounded = jnp.issubdtype(dtype, jnp.inexact)
    if not is_rounded and rtol is None:
        return 0.0
    eps = float(jnp.finfo(dtype).eps) if is_rounded else 0.0
    relative = max(2 * eps, min(4 * math.sqrt(eps), 0.1)) if rtol is None else rtol
    # Below one rounding error of 1, values are taken for zeros: their terms may cancel.
    return relative * float(np.max(np.abs(want), initial=0.0, where=np.isfinite(want))) + eps


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex128 if jnp.issubdtype(array.dtype, jnp.complexfloating) else np.float64)
