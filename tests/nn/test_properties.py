"""Layers of odd sizes, with nothing in them, and with large values."""

import math
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies

import eqxcallback as eqxc
from eqxcallback import nn, ops

from .drop_ins import randomized
from .naive import normal, quickly_compiled
from .parts import DTYPES, KEY, apart, filled, widened


pytestmark = pytest.mark.any_jax_version


# Of any size, batched, against Equinox's layers, or against the reference.


def sized(name: str, sizes: Any, implementation: Any, dtype: Any) -> tuple[Any, Any]:
    """A layer, and the shapes of its arguments. An integer is an index below it."""
    a, b, length, keys = sizes
    options: Any = {"implementation": implementation, "dtype": dtype}
    keyed = {"key": KEY, **options}
    grouped = {"num_kv_heads": b, "head_size": 2 * b, "causal": length % 2 == 0, "window": a, "soft_cap": 5.0}
    made: dict[str, Any] = {
        "Linear": lambda: (nn.Linear(a, b, **keyed), [(a,)]),
        "MLP": lambda: (nn.MLP(a, b, a + b, 2, **keyed), [(a,)]),
        "Embedding": lambda: (nn.Embedding(a, b, **keyed), [a]),
        "RotaryPositionalEmbedding": lambda: (nn.RotaryPositionalEmbedding(2 * a, **options), [(length, 2 * a)]),
        "GRUCell": lambda: (nn.GRUCell(a, b, **keyed), [(a,), (b,)]),
        "LSTMCell": lambda: (nn.LSTMCell(a, b, **keyed), [(a,), ((b,), (b,))]),
        "MultiheadAttention": lambda: (
            nn.MultiheadAttention(a, 2 * a, vo_size=b, **keyed),
            [(length, 2 * a), (keys + 1, 2 * a), (keys + 1, 2 * a)],
        ),
        "GroupedQueryAttention": lambda: (
            nn.GroupedQueryAttention(a * b, a, **grouped, alibi=True, **keyed),
            [(length, a), (keys, a)],
        ),
        "SwiGLU": lambda: (nn.SwiGLU(a, b, a + b, **keyed), [(a,)]),
        "GEGLU": lambda: (nn.GEGLU(a, b, a + b, approximate=a % 2 == 0, **keyed), [(a,)]),
    }
    return filled(made[name], dtype)


def drawn(rng: np.random.Generator, shape: Any, batch: int, dtype: Any) -> Any:
    if isinstance(shape, int):
        return jnp.asarray(rng.integers(0, shape, batch))
    if shape and isinstance(shape[0], tuple):
        return tuple(drawn(rng, part, batch, dtype) for part in shape)
    return jnp.asarray(rng.standard_normal((batch, *shape)).astype(dtype))


# Each example compiles a program: nothing looks for a smaller one that fails.
few = hypothesis.settings(max_examples=4, deadline=None, derandomize=True, phases=[hypothesis.Phase.generate])
SIZES = strategies.sampled_from([3, 1, 17, 7, 2])
LENGTHS = strategies.sampled_from([5, 0, 1, 17])
BATCHES = strategies.sampled_from([3, 0, 1])
SEEDS = strategies.integers(0, 2**32 - 1)


@pytest.mark.parametrize(
    "name",
    [
        *("Linear", "MLP", "Embedding", "RotaryPositionalEmbedding", "GRUCell", "LSTMCell"),
        *("MultiheadAttention", "GroupedQueryAttention", "SwiGLU", "GEGLU"),
    ],
)
@few
@hypothesis.given(
    sizes=strategies.tuples(SIZES, SIZES, LENGTHS, LENGTHS),
    batch=BATCHES,
    dtype=strategies.sampled_from(list(DTYPES)),
    implementation=strategies.sampled_from(["auto", "python"]),
    seed=SEEDS,
)
def test_any_size(name, sizes, batch, dtype, implementation, seed):
    kind: Any = DTYPES[dtype]
    ours, shapes = sized(name, sizes, implementation, kind)
    plain, _ = sized(name, sizes, "reference", jnp.float32)
    if sizes[2] or name != "MultiheadAttention":  # Equinox's takes no empty sequence
        plain = eqxc.unfuse(plain)
    rng = np.random.default_rng(seed)
    args = tuple(drawn(rng, shape, batch, kind) for shape in shapes)
    arrays, whole = apart(ours)
    _, whole_plain = apart(plain)

    @quickly_compiled
    def both(arrays: Any, args: Any) -> Any:
        def one(make: Any, arrays: Any, args: Any) -> Any:
            call = lambda arrays, *floats: jax.vmap(lambda *args: make(arrays)(*args))(*floats, *integers)
            integers = [arg for arg in args if not jnp.issubdtype(jax.tree.leaves(arg)[0].dtype, jnp.floating)]
            out, pull = jax.vjp(call, arrays, *args[: len(args) - len(integers)])
            return out, pull(jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), out))

        return one(whole, arrays, args), one(whole_plain, widened(arrays), widened(args))

    (got, got_gradients), (want, want_gradients) = both(arrays, args)
    tolerance = {"float32": 1e-5, "bfloat16": 2.0**-5, "float16": 2.0**-8}[dtype]
    near(got, want, tolerance)
    near(got_gradients, want_gradients, 4 * tolerance)


def near(got: Any, want: Any, tolerance: float) -> None:
    """Relative to the largest value of all."""
    pairs = [[np.asarray(x, np.float64) for x in pair] for pair in zip(*map(jax.tree.leaves, (got, want)), strict=True)]
    largest = max((np.abs(w).max(initial=1.0) for _, w in pairs), default=1.0)
    for g, w in pairs:
        assert g.shape == w.shape
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance * largest)


# Norms of all magnitudes, against NumPy in f64.


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "GroupNorm", "FusedAddRMSNorm"])
@hypothesis.settings(few, max_examples=8)
@hypothesis.given(
    size=SIZES,
    batch=BATCHES,
    dtype=strategies.sampled_from(list(DTYPES)),
    exponent=strategies.sampled_from([18, 37, 0, 25, -3, 4]),
    implementation=strategies.sampled_from(["auto", "reference", "python"]),
    seed=SEEDS,
)
def test_norms_of_any_magnitude(name, size, batch, dtype, exponent, implementation, seed):
    kind: Any = DTYPES[dtype]
    magnitude = 10.0 ** (min(exponent, 4) if dtype == "float16" else exponent)
    channels = 2 * size if name == "GroupNorm" else size
    shape = (channels, 3) if name == "GroupNorm" else (channels,)
    sizes = (2, channels) if name == "GroupNorm" else (channels,)
    layer = randomized(getattr(nn, name)(*sizes, dtype=kind, implementation=implementation))
    rng = np.random.default_rng(seed)
    x, dy = jnp.asarray(magnitude * rng.uniform(-1, 1, (batch, *shape)), kind), rng.standard_normal((batch, *shape))

    @quickly_compiled
    def value_and_gradient(layer: Any, x: Any, dy: Any) -> Any:
        call = lambda x: jax.vmap(layer)(x, x / 2)[0] if name == "FusedAddRMSNorm" else jax.vmap(layer)(x)
        y, pull = jax.vjp(call, x)
        return y, pull(dy)[0]

    got = value_and_gradient(layer, x, jnp.asarray(dy, kind))
    factor = 1.5 if name == "FusedAddRMSNorm" else 1.0
    total = np.asarray(x + x / 2 if name == "FusedAddRMSNorm" else x, np.float64)
    want, gradient, scale = norm(name, layer, total, np.asarray(jnp.asarray(dy, kind), np.float64))
    tolerance = {"float32": 1e-5, "bfloat16": 2.0**-6, "float16": 2.0**-8}[dtype]
    near(got[0], want, tolerance)
    if dtype == "float32" and scale > 1e-30:  # smaller ones become zeros
        near(np.asarray(got[1], np.float64) / scale, factor * gradient / scale, 1e-4)
    assert np.isfinite(np.asarray(got[1], np.float64)).all()


def norm(name: str, layer: Any, x: Any, dy: Any) -> tuple[Any, Any, float]:
    """The norm of each row, the gradient of x, and how large its terms are, which may cancel."""
    shape = x.shape
    weight, bias = (0 if w is None else np.asarray(w, np.float64) for w in (layer.weight, getattr(layer, "bias", None)))
    if name == "GroupNorm":
        weight, bias = (np.asarray(w)[:, None] for w in (weight, bias))
        x = x.reshape(len(x), layer.groups, math.prod(shape[1:]) // layer.groups)
    centre = name in ("LayerNorm", "GroupNorm")
    x = x - x.mean(-1, keepdims=True) if centre else x
    inverse = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + layer.eps)
    y = x * inverse
    g = (dy * weight).reshape(x.shape)
    dx = inverse * (g - (g.mean(-1, keepdims=True) if centre else 0) - y * (g * y).mean(-1, keepdims=True))
    return y.reshape(shape) * weight + bias, dx.reshape(shape), np.abs(inverse * g).max(initial=0)


@pytest.mark.parametrize("implementation", ["auto", "reference", "python"])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("value", [1e18, -1e30])
def test_rows_of_one_large_value(value, size, implementation):
    """Nothing is left of them, and eps says what that is divided by."""
    x = jnp.full((2, size), value)
    layer = randomized(nn.LayerNorm(size, implementation=implementation))
    y, pull = quickly_compiled(lambda x: (jax.vmap(layer)(x), jax.grad(lambda x: jax.vmap(layer)(x)[0, 0])(x)))(x)
    assert layer.bias is not None
    np.testing.assert_array_equal(y, jnp.broadcast_to(layer.bias, y.shape))
    assert jnp.isfinite(pull).all()


# Losses of large logits, with labels of all kinds.


@pytest.mark.parametrize("fused", [False, True])
@hypothesis.settings(few, max_examples=6)
@hypothesis.given(
    size=SIZES,
    batch=BATCHES,
    dtype=strategies.sampled_from(list(DTYPES)),
    magnitude=strategies.sampled_from([1e4, 1.0]),
    implementation=strategies.sampled_from(["auto", "reference", "python"]),
    seed=SEEDS,
)
def test_losses_of_large_logits(fused, size, batch, dtype, magnitude, implementation, seed):
    kind: Any = DTYPES[dtype]
    rng = np.random.default_rng(seed)
    options: Any = {"label_smoothing": 0.25, "z_loss": 1e-6, "ignore_index": 0, "implementation": implementation}
    labels = jnp.asarray(rng.integers(-size, size, batch), jnp.int32)
    if fused:
        layer = nn.FusedLinearCrossEntropy(4, size, dtype=kind, key=KEY, **options)
        x = jnp.asarray(magnitude * rng.standard_normal((batch, 4)), kind)
        z = np.asarray(x, np.float64) @ np.asarray(layer.weight, np.float64).T
    else:
        layer = nn.SoftmaxCrossEntropy(**options)
        x = jnp.asarray(magnitude * rng.standard_normal((batch, size)), kind)
        z = np.asarray(x, np.float64)
    call = quickly_compiled(
        lambda layer, x, labels: (
            jax.vmap(layer)(x, labels),
            jax.grad(lambda x: jax.vmap(layer)(x, labels).sum())(x),
        )
    )
    got, gradient = call(layer, x, labels)
    highest = z.max(-1, keepdims=True)
    total = (np.log(np.exp(z - highest).sum(-1, keepdims=True)) + highest)[:, 0]
    chosen = z[np.arange(batch), np.asarray(labels)]
    want = 0.75 * (total - chosen) + 0.25 * (total - z.mean(-1)) + 1e-6 * total**2
    ignored = np.asarray(labels) == 0
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, np.where(ignored, 0, want), rtol=1e-5, atol=1e-5 * magnitude)
    assert np.isfinite(np.asarray(gradient, np.float64)).all()
    assert (np.asarray(gradient)[ignored] == 0).all()


# Attention: rows that see nothing, and large logits.


@pytest.mark.parametrize("name", ["MultiheadAttention", "GroupedQueryAttention"])
@hypothesis.settings(few, max_examples=6)
@hypothesis.given(
    length=strategies.sampled_from([5, 1, 17]),
    keys=strategies.sampled_from([3, 1, 18]),
    density=strategies.sampled_from([0.5, 0.0, 0.1]),
    dtype=strategies.sampled_from(list(DTYPES)),
    implementation=strategies.sampled_from(["auto", "reference", "python"]),
    seed=SEEDS,
)
def test_rows_that_see_nothing(name, length, keys, density, dtype, implementation, seed):
    """They give zeros, and have gradients of zeros; all others are finite."""
    kind: Any = DTYPES[dtype]
    more = {"causal": False} if name == "GroupedQueryAttention" else {}
    layer = getattr(nn, name)(2, 6, dtype=kind, key=KEY, implementation=implementation, **more)
    rng = np.random.default_rng(seed)
    mask = rng.random((length, keys)) < density
    x, kv = (drawn(rng, (6,), count, kind) for count in (length, keys))
    call = lambda x, kv, mask: layer(x, kv, kv, mask) if name == "MultiheadAttention" else layer(x, kv, mask=mask)

    @quickly_compiled
    def value_and_gradients(x: Any, kv: Any, mask: Any) -> Any:
        out, pull = jax.vjp(lambda x, kv: call(x, kv, mask), x, kv)
        return out, *pull(jnp.ones_like(out))

    out, dx, dkv = (np.asarray(array, np.float64) for array in value_and_gradients(x, kv, jnp.asarray(mask)))
    nothing = ~mask.any(axis=1)
    assert (out[nothing] == 0).all()
    assert (dx[nothing] == 0).all()
    assert (dkv[~mask.any(axis=0)] == 0).all()
    assert np.isfinite(out).all()
    assert np.isfinite(dx).all()
    assert np.isfinite(dkv).all()
    assert (np.abs(out[~nothing]).sum(axis=1) > 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", ["auto", "reference", "python"])
def test_logits_of_ten_thousand(implementation, dtype):
    """Each query sees the one key that is its own, whose logit is 1e4, beside others of -1e4 and 0."""
    kind: Any = DTYPES[dtype]
    q = jnp.eye(5, 8, dtype=kind)[:, None] * 100
    k = jnp.concatenate([q, -q])[:, :1]
    v = jnp.asarray(normal(1, 10, 1, 8), kind)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return ops.attention(q, k, v, scale=1.0, implementation=implementation)

    out, pull = jax.vjp(attend, q, k, v)
    np.testing.assert_array_equal(out, v[:5])
    dq, dk, dv = pull(jnp.ones_like(out))
    # What is left of 100 - 100, times keys of 100.
    for gradient in (dq, dk):
        np.testing.assert_allclose(np.asarray(gradient, np.float64), 0, atol=1e-4)
    np.testing.assert_array_equal(dv, jnp.concatenate([jnp.ones_like(out), jnp.zeros_like(out)]))
