"""Attention and all of its gradients, and how close they have to be."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eqxcallback import ops

from ..ops.table import normal


def value_and_gradients(operands: Any, chosen: Mapping[str, Any]) -> Any:
    """Return both results, and the gradients by all operands that have one. `chosen`: options."""
    numbers = {name: x for name, x in chosen.items() if name in ("bias", "alibi_slopes")}
    others = {name: x for name, x in chosen.items() if name not in numbers}

    def weighed(q, k, v, numbers):
        out, lse = ops.attention_with_lse(q, k, v, **numbers, **others)
        seen = jnp.where(jnp.isfinite(lse), lse, 0.0)
        return (out.astype(np.float32) * normal(9, out.shape)).sum() + (seen * normal(10, lse.shape)).sum(), (out, lse)

    return jax.value_and_grad(weighed, argnums=(0, 1, 2, 3), has_aux=True)(*operands, numbers)


def check_each(got: Any, want: Any) -> None:
    def check(got, want):
        error = 2e-5 if got.dtype == np.float32 else 2**-7
        np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=error, atol=error)

    jax.tree.map(check, got, want)
