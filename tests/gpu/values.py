"""The tolerances of a GPU's results, and the references that they are compared with."""

import math

import jax
import ml_dtypes
import numpy as np


F32, BF16, F16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
DTYPES = (F32, BF16, F16)

# Of a GPU's approximations of exp, rsqrt and division, which a CPU's tests (`ops/table.py`) do not have: some bits more.
_F32 = 2.0**-18


def tolerate(got, want, terms):
    """In place of `table.tolerate`: 16 bits are rounded once, and f32 is as close as sums in any order are on a GPU."""
    close(got, want, rtol=_rounding(got), atol=_F32 * math.sqrt(terms + 1))


def tolerate_products(got, want, terms):
    """Compare results of attention: in 16 bits its weights are rounded before they are multiplied, as tensor cores want them."""
    got = np.asarray(got)
    eps = _F32 * math.sqrt(terms + 1) if got.dtype == F32 else 2 * float(ml_dtypes.finfo(got.dtype).eps)
    close(got, want, rtol=0, atol=eps)


def close(got, want, *, rtol, atol):
    """`atol` is of the largest wanted value, or of 1 if that is smaller."""
    got, want = (np.asarray(x) for x in (got, want))
    want = want.astype(np.float32)
    scale = max(1.0, float(np.abs(want).max(initial=0, where=np.isfinite(want))))
    np.testing.assert_allclose(got.astype(np.float32), want, rtol=rtol, atol=atol * scale)


def _rounding(got):
    return _F32 if np.asarray(got).dtype == F32 else float(ml_dtypes.finfo(np.asarray(got).dtype).eps)


def on_device(function, *args):
    """Compiled for the GPU, in f32's full precision: XLA would take TF32 for its products."""
    with jax.default_matmul_precision("highest"):
        return jax.tree.map(np.asarray, jax.jit(function)(*args))


def kernels_in(function, *args):
    """Count the calls of our launcher in a program."""
    return program_text(function, *args).count("stablehlo.custom_call @eqxcallback_launch")


def program_text(function, *args):
    """The program before XLA compiles it, with the names of our kernels."""
    return jax.jit(function).lower(*args).as_text()
