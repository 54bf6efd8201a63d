"""A bias that examples, heads or queries share, and its gradient, which is the sum over all that share it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops

from .. import table
from ..table import normal
from . import options


@pytest.mark.parametrize("shared", [(1, 1), (3, 1), (1, 4), (3, 4), (4,)], ids=str)
@pytest.mark.parametrize("rows", [70, 1], ids=["", "and queries"])
def test_gradients_of_a_bias_that_examples_share(shared, rows, isa):
    bias, queries = (*shared, rows, 9), 70
    q, k, v = (normal(i, (3, n, h, 5)) for i, (n, h) in enumerate([(queries, 4), (9, 2), (9, 2)]))
    args: Any = (q, k, v)
    given = {"bias": normal(4, bias), "alibi_slopes": np.ones(4, np.float32), "soft_cap": 1.0}
    for got, want in zip(
        options.gradients(args, given, "auto"), options.gradients(args, given, "reference"), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("implementation", ["native", "reference"])
def test_gradients_of_a_bias_of_keys_are_rounded_once(implementation):
    """As those of plain JAX are: after the sum over queries, of which there are several blocks."""
    q, k, v = (normal(i, (2, n, h, 8)) for i, (n, h) in enumerate([(700, 4), (130, 2), (130, 2)]))
    bias = normal(4, (2, 1, 1, 130), table.DTYPES[1])
    got = options.gradients((q, k, v), {"bias": bias}, implementation)[3]
    want = options.gradients((q, k, v), {"bias": bias.astype(np.float32)}, "reference")[3]
    assert got.dtype == bias.dtype
    np.testing.assert_allclose(got.astype(np.float32), want, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize(("queries", "keys"), [(1, 9), (0, 9), (9, 0), (9, 1)])
def test_a_bias_of_keys_beside_few_of_them(queries, keys):
    args: Any = options.inputs(queries, keys, 4, 2, 5)
    given = {"bias": normal(4, (4, 1, keys)), "mask": np.arange(keys).reshape(1, 1, keys) != 3}
    for got, want in zip(
        options.gradients(args, given, "native"), options.gradients(args, given, "reference"), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis", [0, 1, 2, None])
def test_a_bias_of_keys_under_vmap(axis):
    """Mapped itself, beside queries that are mapped or not; or shared by all examples."""
    q, k, v = (normal(i, (3, n, h, 5)) for i, (n, h) in enumerate([(70, 4), (9, 2), (9, 2)]))
    bias = normal(4, (1, 1, 9) if axis is None else (*[4, 1][:axis], 3, *[4, 1, 9][axis:]))

    def mapped(implementation, in_q):
        def loss(q, k, v, bias):
            return jnp.sin(ops.attention(q, k, v, bias=bias, implementation=implementation)).sum()

        f = jax.vmap(jax.value_and_grad(loss, (0, 1, 2, 3)), (in_q, in_q, 0, axis))
        return table.quickly_compiled(f)(q if in_q == 0 else q[0], k if in_q == 0 else k[0], v, bias)

    for in_q in (0, None):
        for got, want in zip(*(jax.tree.leaves(mapped(name, in_q)) for name in ("native", "reference")), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5 * np.abs(want).max())
