"""Gradients in 16 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops

from .. import table
from ..table import DTYPES, normal
from .cases import attention


@pytest.mark.parametrize("implementation", ["reference", "auto"])
def test_bf16_has_the_derivatives_of_its_definition(implementation):
    """A kernel's differ by how bf16 rounds."""
    case = attention(DTYPES[1], (), 3, 5, 4, 2, 6, True)

    def grad(f):
        return table.quickly_compiled(jax.grad(lambda *args: f(*args).astype(jnp.float32).sum(), (0, 1, 2)))

    def op(*args):
        return case.op(*args, implementation=implementation)

    for got, want in zip(grad(op)(*case.args), grad(case.reference)(*case.args), strict=True):
        assert got.dtype == DTYPES[1]
        got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
        if implementation == "reference":
            np.testing.assert_array_equal(got, want)
        np.testing.assert_allclose(got, want, rtol=2**-7, atol=2**-8)


def exact_gradients(operands, scale, causal):
    """In f64, of one head."""
    q, k, v, cotangent = (x[:, 0].astype(np.float64) for x in operands)
    logits = scale * q @ k.T
    if causal:
        logits = np.where(np.tril(np.ones(logits.shape, bool)), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    of_weights = cotangent @ v.T
    of_logits = scale * weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True))
    return of_logits @ k, of_logits.T @ q, weights.T @ cotangent


def pulled_back(q, k, v, cotangent, **options):
    return jax.vjp(lambda *args: ops.attention(*args, **options), q, k, v)[1](cotangent)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [0.125, 2.5])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_sixteen_bits_are_as_near_as_f32_rounded_once(dtype, scale, causal, isa):
    """The sum of cotangent * result comes from weights: of a rounded result, it made `dq` and `dk` 4.5 times worse at 2.5."""
    operands = [normal(seed, (130, 1, 64), dtype) for seed in range(4)]
    gradients = table.quickly_compiled(table.with_options(pulled_back, scale=scale, causal=causal))
    in_f32 = gradients(*(x.astype(np.float32) for x in operands))
    exact = exact_gradients(operands, scale, causal)
    for got, once, want in zip(gradients(*operands), in_f32, exact, strict=True):
        errors = [np.linalg.norm(np.asarray(x, np.float64)[:, 0] - want) for x in (got, np.asarray(once).astype(dtype))]
        assert errors[0] < 1.05 * errors[1]
