"""Training gives the same curve as Equinox's layers do: small transformers on scikit-learn's digits."""

import functools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from sklearn.datasets import load_digits

import eqxcallback as eqxc
from eqxcallback import nn


STEPS, CHUNK, BATCH, TOKENS, WIDTH, HEADS, KV_HEADS, HIDDEN = 200, 10, 32, 16, 24, 4, 2, 40
LEARNING_RATE, B1, B2 = 3e-3, 0.9, 0.99
SMOOTHING, Z_LOSS, THETA = 0.1, 1e-3, 100.0


@functools.cache
def digits() -> tuple[Any, Any]:
    """Patches of 2 x 2 pixels, `(images, 16, 4)`, and labels, in an order that mixes who wrote them."""
    images, labels = load_digits(return_X_y=True)
    patches = images.reshape(-1, 4, 2, 4, 2).transpose(0, 1, 3, 2, 4).reshape(-1, TOKENS, 4)
    order = np.random.default_rng(0).permutation(len(labels))
    return np.asarray(patches[order] / 8 - 1, np.float32), np.asarray(labels[order], np.int32)


# What Equinox has too: the same code with either's layers.


class Block(eqx.Module):
    norms: list[Any]
    attention: Any
    mlp: Any

    def __init__(self, layers: Any, key: Any):
        keys = jr.split(key)
        self.norms = [layers.LayerNorm(WIDTH) for _ in range(2)]
        self.attention = layers.MultiheadAttention(HEADS, WIDTH, use_output_bias=True, key=keys[0])
        self.mlp = layers.MLP(WIDTH, WIDTH, HIDDEN, 1, jax.nn.gelu, key=keys[1])

    def __call__(self, x: Any) -> Any:
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class Classifier(eqx.Module):
    patches: Any
    positions: Any
    blocks: list[Block]
    norm: Any
    head: Any

    def __init__(self, layers: Any, key: Any):
        keys = jr.split(key, 5)
        self.patches = layers.Linear(4, WIDTH, key=keys[0])
        self.positions = layers.Embedding(TOKENS, WIDTH, key=keys[1])
        self.blocks = [Block(layers, key) for key in keys[2:4]]
        self.norm = layers.LayerNorm(WIDTH)
        self.head = layers.Linear(WIDTH, 10, key=keys[4])

    def logits(self, patches: Any) -> Any:
        x = jax.vmap(self.patches)(patches) + jax.vmap(self.positions)(jnp.arange(TOKENS))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(axis=0)))

    def loss(self, patches: Any, label: Any) -> Any:
        return -jax.nn.log_softmax(self.logits(patches))[label]


# What Equinox lacks: the same arrays in its linear layers and norms, and `jax.numpy` between them.


class ModernBlock(eqx.Module):
    norms: list[Any]
    attention: Any
    glu: Any

    def __init__(self, key: Any):
        keys = jr.split(key)
        self.norms = [nn.RMSNorm(WIDTH, use_bias=False) for _ in range(2)]
        self.attention = nn.GroupedQueryAttention(
            HEADS, WIDTH, num_kv_heads=KV_HEADS, rope_theta=THETA, use_query_bias=True, key=keys[0]
        )
        self.glu = nn.SwiGLU(WIDTH, HIDDEN, key=keys[1])

    def __call__(self, x: Any, attend: Any, gate: Any) -> Any:
        x = x + attend(self.attention, jax.vmap(self.norms[0])(x))
        return x + jax.vmap(functools.partial(gate, self.glu))(jax.vmap(self.norms[1])(x))


class Modern(eqx.Module):
    patches: Any
    blocks: list[ModernBlock]
    norm: Any
    head: nn.FusedLinearCrossEntropy
    is_plain: bool = eqx.field(static=True)

    def __init__(self, key: Any, is_plain: bool = False):
        keys = jr.split(key, 4)
        self.patches = nn.Linear(4, WIDTH, key=keys[0])
        self.blocks = [ModernBlock(key) for key in keys[1:3]]
        self.norm = nn.RMSNorm(WIDTH, use_bias=False)
        self.head = nn.FusedLinearCrossEntropy(
            WIDTH, 10, label_smoothing=SMOOTHING, z_loss=Z_LOSS, soft_cap=20.0, key=keys[3]
        )
        self.is_plain = is_plain

    def hidden(self, patches: Any) -> Any:
        attend, gate = (attention, swiglu) if self.is_plain else (lambda layer, x: layer(x),) * 2
        x = jax.vmap(self.patches)(patches)
        for block in self.blocks:
            x = block(x, attend, gate)
        return self.norm(x[-1])  # the only one that sees all others

    def logits(self, patches: Any) -> Any:
        return 20 * jnp.tanh(self.head.weight @ self.hidden(patches) / 20)

    def loss(self, patches: Any, label: Any) -> Any:
        if not self.is_plain:
            return self.head(self.hidden(patches), label)
        z = self.logits(patches)
        total = jax.nn.logsumexp(z)
        return (1 - SMOOTHING) * (total - z[label]) + SMOOTHING * (total - z.mean()) + Z_LOSS * total**2


def attention(layer: Any, x: Any) -> Any:
    """Causal, with a rotary embedding and keys and values that two query heads share."""
    size = WIDTH // HEADS
    q, k, v = (
        jax.vmap(projection)(x).reshape(TOKENS, -1, size)
        for projection in (layer.query_proj, layer.key_proj, layer.value_proj)
    )
    angles = np.arange(TOKENS)[:, None] * THETA ** (-np.arange(0, size, 2) / size)[None]
    cos, sin = (jnp.asarray(f(angles), jnp.float32)[:, None] for f in (np.cos, np.sin))

    def rotated(x: Any) -> Any:
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=1) for x in (rotated(k), v))
    logits = jnp.einsum("shd,thd->hst", rotated(q), k) / math.sqrt(size)
    weights = jax.nn.softmax(jnp.where(jnp.tri(TOKENS, dtype=bool)[None], logits, -jnp.inf))
    return jax.vmap(layer.output_proj)(jnp.einsum("hst,thd->shd", weights, v).reshape(TOKENS, WIDTH))


def swiglu(layer: Any, x: Any) -> Any:
    return layer.down_proj(jax.nn.silu(layer.gate_proj(x)) * layer.up_proj(x))


def plain_modern(key: Any) -> Any:
    return eqxc.unfuse(Modern(key, is_plain=True))


PAIRS = {
    "drop-ins": (functools.partial(Classifier, nn), functools.partial(Classifier, eqx.nn)),
    "modern": (Modern, plain_modern),
}


@functools.cache
def trained(make: Any) -> tuple[Any, Any, float]:
    """The mean of the gradients of the first steps, all losses, and the accuracy on images that training did not have."""
    model = make(jr.key(0))
    start, static = eqx.partition(model, eqx.is_inexact_array)
    patches, labels = digits()
    train = len(labels) - 400

    def mean_loss(parts: Any, batch: Any) -> Any:
        return jax.vmap(eqx.combine(parts, static).loss)(*batch).mean()

    def step(state: Any, batch: Any) -> Any:
        """Adam's."""
        parts, mean, square, count = state
        loss, gradients = jax.value_and_grad(mean_loss)(parts, batch)
        mean = jax.tree.map(lambda m, g: B1 * m + (1 - B1) * g, mean, gradients)
        square = jax.tree.map(lambda v, g: B2 * v + (1 - B2) * g**2, square, gradients)
        count = count + 1
        rate = LEARNING_RATE * jnp.sqrt(1 - B2**count) / (1 - B1**count)
        parts = jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), parts, mean, square)
        return (parts, mean, square, count), loss

    steps = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches))
    zeros = jax.tree.map(jnp.zeros_like, start)
    state, losses, first = (start, zeros, zeros, jnp.zeros(())), [], None
    for i in range(0, STEPS, CHUNK):
        index = (BATCH * i + np.arange(BATCH * CHUNK)) % train
        batches = (patches[index].reshape(CHUNK, BATCH, TOKENS, 4), labels[index].reshape(CHUNK, BATCH))
        state, chunk = steps(state, batches)
        first = state[1] if first is None else first
        losses.append(chunk)
    model = eqx.combine(state[0], static)
    right = jnp.argmax(jax.jit(jax.vmap(model.logits))(patches[train:]), axis=-1) == labels[train:]
    gradients = [np.asarray(x, np.float64) for x in jax.tree.leaves(first)]
    return gradients, np.concatenate(losses).astype(np.float64), float(right.mean())


@pytest.mark.parametrize("name", PAIRS)
def test_the_first_gradients_are_the_same(name):
    """A gradient that is 1% wrong shows here, and then in all losses."""
    (ours, _, _), (theirs, _, _) = (trained(make) for make in PAIRS[name])
    for got, want in zip(ours, theirs, strict=True):
        largest = np.abs(want).max()
        assert largest > 1e-4
        assert np.abs(got - want).max() <= 1e-4 * largest


@pytest.mark.parametrize("name", PAIRS)
def test_the_loss_curves_are_the_same(name):
    (_, ours, _), (_, theirs, _) = (trained(make) for make in PAIRS[name])
    assert len(ours) == STEPS
    np.testing.assert_allclose(ours[:20], theirs[:20], rtol=2e-6)
    # Roundings grow from step to step.
    smooth = lambda losses: np.convolve(losses, np.ones(20) / 20, "valid")
    np.testing.assert_allclose(smooth(ours), smooth(theirs), rtol=1e-4)


@pytest.mark.parametrize("name", PAIRS)
def test_both_learn(name):
    (_, losses, ours), (_, _, theirs) = (trained(make) for make in PAIRS[name])
    assert losses[-20:].mean() < losses[:20].mean() / 2
    assert min(ours, theirs) > 0.85
    assert abs(ours - theirs) <= 0.01
