"""Taylor mode, `jax.experimental.jet`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import jet

import eqxcallback as eqxc
from eqxcallback import debug, nn, ops

from ..layers import Sine, runs


ORDER = 3


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def series_of(args):
    return [[normal(10 * i + j, *x.shape, dtype=x.dtype) for j in range(ORDER)] for i, x in enumerate(args)]


def check(function, reference, *args, rtol=1e-5):
    series = series_of(args)
    got, expected = jet.jet(function, args, series), jet.jet(reference, args, series)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * np.abs(b).max())


LABELS = jnp.array([1, 2, 0, 3, 4])
X, Q = normal(0, 5, 8), normal(1, 1, 6, 2, 4)
OPS = {
    "gelu": (ops.gelu, jax.nn.gelu, X),
    "softmax": (ops.softmax, jax.nn.softmax, X),
    "swiglu": (ops.swiglu, lambda gate, up: jax.nn.silu(gate) * up, X, X + 1),
    "rms_norm": (
        lambda x, w: ops.rms_norm(x, w, eps=1e-6),
        lambda x, w: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w[None],
        X,
        normal(2, 8),
    ),
    "linear": (ops.linear, lambda x, w: jnp.einsum("bi,oi->bo", x, w), X, normal(2, 3, 8)),
    "attention": (
        lambda q, k: ops.attention(q, k, k, causal=True),
        lambda q, k: jax.nn.dot_product_attention(q, k, k, is_causal=True),
        Q,
        Q + 1,
    ),
    "softmax_cross_entropy": (
        lambda x: ops.softmax_cross_entropy(x, LABELS),
        lambda x: -jnp.take_along_axis(jax.nn.log_softmax(x), LABELS[:, None], 1)[:, 0],
        X,
    ),
}


@pytest.mark.parametrize("op", OPS)
def test_ops(op):
    function, reference, *args = OPS[op]
    check(function, reference, *args)


def expanded(f):
    return lambda x: jet.jet(f, (x,), [[x, x * x]])


PROGRAMS = {
    "jit inside": lambda model: expanded(jax.jit(jax.vmap(model))),
    "jit outside": lambda model: jax.jit(expanded(jax.vmap(model))),
    "vmap outside": lambda model: jax.vmap(expanded(model)),
    "grad outside": lambda model: jax.grad(lambda x: expanded(jax.vmap(model))(x)[1][1].sum()),
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("activation", [jnp.tanh, jax.nn.gelu, jax.nn.silu])
def test_a_model_that_was_fused(activation, program):
    model = eqx.nn.MLP(8, 3, 16, 2, activation=activation, key=jax.random.key(0))
    got, expected = (PROGRAMS[program](of)(X) for of in (eqxc.fuse(model), model))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_terms_in_bf16():
    layer = nn.Linear(8, 3, use_bias=False, dtype=jnp.bfloat16, key=jax.random.key(0))
    check(jax.vmap(layer), lambda x: jnp.einsum("bi,oi->bo", x, layer.weight), X.astype(jnp.bfloat16), rtol=0.02)


def test_the_kernel_computes_the_value():
    runs.clear()
    value, (first, second) = jet.jet(Sine(), (X,), [[X, X * X]])
    assert runs == ["kernel"]
    np.testing.assert_allclose(value, np.sin(X), rtol=1e-6)
    np.testing.assert_allclose(first, np.cos(X) * X, rtol=1e-5)
    np.testing.assert_allclose(second, np.cos(X) * X * X - np.sin(X) * X * X, rtol=1e-4, atol=1e-6)


def test_whole_numbers():
    parity = eqxc.Op(
        "parity",
        kernels={"cpu": eqxc.PythonKernel(lambda ctx, out, n: np.copyto(np.asarray(out), np.asarray(n) % 2))},
        reference=lambda n: n % 2,
    )
    value, (first,) = jet.jet(lambda x: parity(x.astype(jnp.int32)).astype(jnp.float32) * x, (X,), [[X]])
    expected = np.asarray(X) * (np.asarray(X).astype(int) % 2)
    np.testing.assert_array_equal(value, expected)
    np.testing.assert_array_equal(first, expected)


def test_a_tap_sees_the_value():
    seen = []
    _, (first,) = jet.jet(lambda x: debug.tap(lambda x, transforms: seen.append(x), x) * 2, (X,), [[X]])
    jax.effects_barrier()
    np.testing.assert_array_equal(seen[0], X)
    np.testing.assert_array_equal(first, 2 * X)


class Doubled(eqxc.Layer):
    def kernel(self, ctx, out, x):
        np.multiply(x, 2, out=np.asarray(out))

    def out_type(self, x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)


def doubled(x):
    return eqxc.buffer_callback(lambda ctx, out, x: None, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def test_a_layer_without_a_reference():
    with pytest.raises(ValueError, match="Layer Doubled: there is no reference, so it has no derivative"):
        jet.jet(Doubled(), (X,), [[X]])


def test_a_callback():
    with pytest.raises(ValueError, match="has no Taylor series"):
        jet.jet(doubled, (X,), [[X]])
