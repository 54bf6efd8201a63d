"""The distance that a result in any dtype may have from a formula in f64."""

import jax.numpy as jnp
import numpy as np


def f64(*arrays):
    return [np.asarray(x, np.float64) for x in arrays]


def near(got, want, dtype):
    """Rounded once from f32, which has summed a few terms."""
    assert got.dtype == dtype
    tolerance = 4e-6 if dtype == jnp.float32 else float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=tolerance, atol=4e-6)
