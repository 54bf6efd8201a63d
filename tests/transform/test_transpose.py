"""`jax.linear_transpose`, by which iterative solvers differentiate: kernels that are linear in an operand have the transpose of
their reference."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.sparse import linalg

import eqxcallback as eqxc
from eqxcallback import ops


KEY = jax.random.key(0)
X, W, BIAS = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(((4, 64), (256, 64), (256,))))
QUEUES, KEYS, VALUES = jax.random.normal(jax.random.key(3), (3, 8, 2, 16))
BLOCKS = np.random.default_rng(0).integers(0, 60, (64, 2 * 34), np.uint8)

# Functions that are linear in their operand, and one of these.
LINEAR = {
    "linear in x": (lambda x: ops.linear(x, W), X),
    "linear in the weight": (lambda w: ops.linear(X, w), W),
    "linear in the bias": (lambda b: ops.linear(jnp.zeros_like(X), W, b), BIAS),
    "linear, bf16": (lambda x: ops.linear(x, W.astype(jnp.bfloat16)), X.astype(jnp.bfloat16)),
    "embedding": (lambda w: ops.embedding(jnp.array([3, 0, 3]), w), W),
    "quantized_linear": (lambda x: ops.quantized_linear(x, BLOCKS, encoding="Q8_0"), X),
    "attention in the values": (lambda v: ops.attention(QUEUES, KEYS, v, causal=True), VALUES),
    "rotary_embedding": (lambda x: ops.rotary_embedding(x, *ops.rotary_table(jnp.arange(8), 16)), QUEUES),
    "cache_append": (lambda cache: ops.cache_append(cache, jnp.zeros((1, 2, 16)), 2), KEYS),
}


@pytest.mark.parametrize("of", [lambda f: f, jax.jit, jax.vmap], ids=["eager", "jit", "vmap"])
@pytest.mark.parametrize("name", LINEAR)
def test_the_transpose_is_the_gradient(name, of):
    function, x = LINEAR[name]
    function, x = of(function), jnp.stack([x, 2 * x]) if of is jax.vmap else x
    out, pullback = jax.vjp(function, x)
    cotangent = jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
    (got,) = jax.linear_transpose(function, x)(cotangent)
    (want,) = pullback(cotangent)
    assert got.dtype == x.dtype
    tolerance = 2e-2 if x.dtype == jnp.bfloat16 else 1e-4
    np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (got, want)), rtol=tolerance, atol=tolerance)


def scale(x, *, rule):
    """Twice `x`, by a function with a rule of its own for one transformation."""

    def twice(x):
        return 2 * x

    if rule == "vmap":
        function = jax.custom_batching.custom_vmap(twice)
        function.def_vmap(lambda size, mapped, x: (3 * x, True))
    elif rule == "jvp":
        function = jax.custom_jvp(twice)
        function.defjvp(lambda primals, tangents: (twice(*primals), 3 * tangents[0]))
    else:
        function = jax.custom_vjp(twice)
        function.defvjp(lambda x: (twice(x), None), lambda _, ct: (3 * ct,))
    return function(x)


@pytest.mark.parametrize("rule", ["vmap", "jvp", "vjp"])
def test_a_reference_with_rules_of_its_own(rule):
    """It is transposed as what it computes, as JAX does where it has a rule."""
    kernel = eqxc.PythonKernel(lambda ctx, out, x, *, rule: out.write(2 * np.asarray(x)))
    op = eqxc.Op("scale", {"cpu": kernel}, scale)
    (got,) = jax.linear_transpose(lambda x: op(x, rule=rule), X)(X)
    np.testing.assert_array_equal(got, 2 * X)


@pytest.mark.parametrize("solve", [linalg.cg, linalg.bicgstab, linalg.gmres])
def test_solvers(solve):
    """The matrix of the equations is a layer's weight."""
    square = W.T @ W / 256 + jnp.eye(64)

    def solution(multiply):
        def loss(b):
            return jnp.sum(jnp.square(solve(lambda x: multiply(x[None])[0], b, tol=1e-6)[0]))

        return jax.value_and_grad(loss)(X[0])

    layer = eqx.tree_at(lambda layer: layer.weight, eqxc.nn.Linear(64, 64, use_bias=False, key=KEY), square)
    got = solution(jax.vmap(layer))
    want = solution(lambda x: x @ square.T)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_what_is_not_linear():
    """The error is that of the reference."""
    texts = []
    for function in (ops.softmax, jax.nn.softmax):
        with pytest.raises(Exception, match="transpose") as error:
            jax.linear_transpose(function, X)(X)
        texts.append(f"{error.type.__name__}: {error.value}")
    assert texts[0] == texts[1]
