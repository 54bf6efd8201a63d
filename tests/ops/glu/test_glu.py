"""Gated activations of all shapes and for all arguments."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops
from eqxcallback.ops.glu import _reference as glu_reference

from .. import table
from ..table import DTYPES, normal


pytestmark = pytest.mark.any_jax_version


@pytest.mark.parametrize("approximate", [True, False])
@pytest.mark.parametrize("shape", [(34,), (3, 2), (2, 3, 126), (0, 4), (101, 602)])
def test_gelu_and_geglu(shape, approximate, isa):
    """The gradient of the reference by tanh has an error of 4e-6, and ours of 2e-6."""
    gated = tuple(table.with_options(f, approximate=approximate) for f in (ops.geglu, glu_reference.geglu))
    plain = tuple(table.with_options(f, approximate=approximate) for f in (ops.gelu, glu_reference.gelu))
    calls = []
    for dtype in DTYPES:
        gate, up = normal(1, shape, dtype, 3.0), normal(2, shape, dtype)
        for (native, reference), args in ((plain, (gate,)), (gated, (gate,)), (gated, (gate, up))):
            of_native, of_reference = (table.gradients_of_sum(f, len(args)) for f in (native, reference))
            calls += [table.Call(native, reference, args), table.Call(of_native, of_reference, args, 1000)]
    table.check_calls(calls)


@pytest.mark.parametrize("approximate", [True, False])
def test_gelu_everywhere(approximate, isa):
    """To f32's own precision where it is near the identity or 0, and wherever the argument lies; NaN goes through."""
    x = np.concatenate([np.linspace(-20, 20, 40_001), [0.0, -0.0, 1e-30, -1e-30, 1e5, -1e5, 3e38, -3e38, np.nan]])
    x = x.astype(np.float32)[:, None]
    gated = np.asarray(ops.geglu(jnp.asarray(x), jnp.ones_like(x), approximate=approximate), np.float64)[:, 0]
    got = np.asarray(ops.gelu(jnp.asarray(x), approximate=approximate), np.float64)[:, 0]
    np.testing.assert_array_equal(got, gated)
    wide = x.astype(np.float64)[:, 0]
    with np.errstate(over="ignore"):
        if approximate:
            inner = np.clip(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3), -1e4, 1e4)
            want = wide / (1 + np.exp(np.minimum(-2 * inner, 700)))
        else:
            want = wide * 0.5 * np.vectorize(math.erfc)(-wide / math.sqrt(2))
    np.testing.assert_allclose(got, want, rtol=5e-6, atol=1e-7)


def test_every_f16_is_read_as_it_is(isa):
    x: Any = np.arange(2**16, dtype=np.uint16).view(np.float16).reshape(-1, 1)
    got = np.asarray(ops.swiglu(np.full_like(x, 100), x))
    with np.errstate(over="ignore", invalid="ignore"):
        want = (np.float32(100) * x.astype(np.float32)).astype(np.float16)
    np.testing.assert_array_equal(got, want)
