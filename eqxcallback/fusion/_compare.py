"""Compare what two models do."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from ..core import PyTree


def compared(model: PyTree, fused: PyTree, example: PyTree, tolerance: float | None, hint: str) -> float:
    """The largest difference of their results, in units of the tolerance.

    **Arguments:**

    - `hint`: what may be to blame, for the error.

    **Raises:** `ValueError` if it is above 1, with the leaf of the result.
    """
    args = example if isinstance(example, tuple) else (example,)
    want, want_tree = tree_flatten_with_path(eqx.filter_jit(model)(*args))
    try:
        got, got_tree = tree_flatten_with_path(eqx.filter_jit(fused)(*args))
    except Exception as error:
        raise ValueError(
            f"fuse: the fused model raises {type(error).__name__} for this example, and the model as it was does not: "
            f"{error}.{hint}"
        ) from error
    # Not the trees: a model may return itself, and then the classes differ.
    if [keystr(path) for path, _ in want] != [keystr(path) for path, _ in got]:
        raise ValueError(
            f"fuse: expected results of one structure, {want_tree}; the fused model gives {got_tree}.{hint}"
        )
    worst = 0.0
    for (path, a), (_, b) in zip(want, got, strict=True):
        if not eqx.is_array(a):
            continue
        name = f"the result{keystr(path)}"
        if not eqx.is_array(b) or (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ValueError(f"fuse: expected {name} to be {jax.typeof(a)}; the fused model gives {b!r}.{hint}")
        error, limit = _difference(a, b, tolerance)
        if not error <= limit:
            raise ValueError(
                f"fuse: expected {name} to differ by at most {limit:.3g} for this example; got {error:.3g}. Leave layers out "
                f"with `exclude`, or pass a larger `tolerance`.{hint}"
            )
        worst = max(worst, error / limit if limit else 0.0)
    return worst


def _difference(a: jax.Array, b: jax.Array, tolerance: float | None) -> tuple[float, float]:
    """The largest difference, and what is allowed: by default what the order of sums makes of the dtype's rounding."""
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return float(np.any(np.asarray(a) != np.asarray(b))), 0.0
    wide = np.complex128 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float64
    x, y = np.asarray(a).astype(wide), np.asarray(b).astype(wide)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore"):
        error = float(np.max(np.where(same, 0.0, np.abs(x - y)), initial=0.0))
    if tolerance is None:
        eps = float(jnp.finfo(a.dtype).eps)
        tolerance = eps * (8 if eps > 1e-4 else 256)
    largest = float(np.max(np.abs(x), initial=0.0, where=np.isfinite(x)))
    return (math.inf if math.isnan(error) else error), tolerance * max(largest, 1.0)
