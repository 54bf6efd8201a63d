"""Layers in loops, branches and other people's derivatives; and kernels with side effects there."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from .layers import WAVES, PureWave, W, X, assert_close, compiled


def with_custom_vjp(f, w, x):
    @jax.custom_vjp
    def g(x):
        return f(w, x)

    def forward(x):
        return f(w, x), x

    def backward(x, cotangent):
        return (f(w, x) * cotangent,)

    g.defvjp(forward, backward)
    return g(x) + jax.grad(lambda x: g(x).sum())(x)


def with_custom_jvp(f, w, x):
    @jax.custom_jvp
    def g(x):
        return f(w, x)

    @g.defjvp
    def _(primals, tangents):
        return g(*primals), f(w, tangents[0])

    return jax.jvp(g, (x,), (w,))


PROGRAMS: dict[str, Any] = {
    "scan": lambda f, w, x: jax.lax.scan(lambda c, _: (f(w, c), c), x, length=3),
    "scan over parameters": lambda f, w, x: jax.lax.scan(lambda c, w: (f(w, c), c), x, jnp.stack([w, x, w])),
    "unrolled scan": lambda f, w, x: jax.lax.scan(lambda c, _: (f(w, c), c), x, length=4, unroll=2),
    "scan in reverse": lambda f, w, x: jax.lax.scan(lambda c, x: (f(w, c), x), x, jnp.stack([w, x]), reverse=True),
    "while": lambda f, w, x: jax.lax.while_loop(
        lambda c: f(w, c[1]).sum() > c[0] - 9, lambda c: (c[0] + 1, f(w, c[1])), (0.0, x)
    ),
    "fori": lambda f, w, x: jax.lax.fori_loop(0, 3, lambda _, c: f(w, c), x),
    "cond": lambda f, w, x: jax.lax.cond(x[0] > 0, f, lambda w, x: x, w, x),
    "cond, other branch": lambda f, w, x: jax.lax.cond(x[0] < 0, f, lambda w, x: x, w, x),
    "switch": lambda f, w, x: jax.lax.switch(1, [lambda w, x: x, f, lambda w, x: f(x, w)], w, x),
    "map": lambda f, w, x: jax.lax.map(lambda x: f(w, x), jnp.stack([x, w, x])),
    "map in batches": lambda f, w, x: jax.lax.map(lambda x: f(w, x), jnp.stack([x, w, x]), batch_size=2),
    "associative scan": lambda f, w, x: jax.lax.associative_scan(f, jnp.stack([w, x, w, x])),
    "nested jit": lambda f, w, x: jax.jit(jax.jit(lambda x: f(w, jax.jit(functools.partial(f, w))(x))))(x),
    "cond in scan": lambda f, w, x: jax.lax.scan(
        lambda c, i: (jax.lax.cond(i % 2 == 0, f, lambda w, x: x, w, c), c), x, jnp.arange(3)
    ),
    "scan in scan": lambda f, w, x: jax.lax.scan(
        lambda c, _: (jax.lax.scan(lambda c, _: (f(w, c), None), c, length=2)[0], c), x, length=2
    ),
    "vmap of scan": lambda f, w, x: jax.vmap(lambda x: jax.lax.scan(lambda c, _: (f(w, c), c), x, length=3))(
        jnp.stack([x, w])
    ),
    "vmap of cond": lambda f, w, x: jax.vmap(lambda x: jax.lax.cond(x[0] > 0.4, f, lambda w, x: x, w, x))(
        jnp.stack([x, w])
    ),
    "vmap of while": lambda f, w, x: jax.vmap(
        lambda x: jax.lax.while_loop(lambda c: c[0] < c[1][0] * 9, lambda c: (c[0] + 1, f(w, c[1])), (0.0, x))
    )(jnp.stack([x, w])),
    "scan of vmap": lambda f, w, x: jax.lax.scan(
        lambda c, _: (jax.vmap(lambda x: f(w, x))(c), c), jnp.stack([x, w]), length=2
    ),
    "custom_vjp": with_custom_vjp,
    "custom_jvp": with_custom_jvp,
}


@pytest.mark.parametrize("lane", ["python", "native"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, lane):
    program = PROGRAMS[name]
    want = compiled(lambda w, x: program(lambda w, x: PureWave(w)(x), w, x), W, X)
    f = lambda w, x: WAVES[lane](w)(x)
    assert_close(compiled(lambda w, x: program(f, w, x), W, X), want)
    if lane == "python" and name in ("scan", "while", "cond", "switch", "map", "associative scan", "vmap of cond"):
        assert_close(program(f, jnp.asarray(W), jnp.asarray(X)), want)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if "while" not in name and "custom" not in name])
def test_gradients_of_programs(name):
    program = PROGRAMS[name]

    def gradients(make):
        def loss(w, x):
            return sum((leaf**2).sum() for leaf in jax.tree.leaves(program(lambda w, x: make(w)(x), w, x)))

        return compiled(jax.grad(loss, (0, 1)), W, X)

    assert_close(gradients(WAVES["python"]), gradients(PureWave), 1e-4)


def test_a_stack_of_layers_as_a_scan():
    """As Equinox has it: parameters are scanned over, the rest is static."""

    def results(make):
        layers = eqx.filter_vmap(lambda w: make(w, 3))(jnp.stack([W, X, W]))
        arrays, static = eqx.partition(layers, eqx.is_array)

        def loss(arrays, x):
            out, _ = jax.lax.scan(lambda c, arrays: (eqx.combine(arrays, static)(c), None), x, arrays)
            return (out**2).sum()

        return jax.value_and_grad(loss, (0, 1))(arrays, X), jax.vmap(loss, (None, 0))(arrays, jnp.stack([X, W]))

    assert_close(results(WAVES["python"]), results(PureWave))


# Side effects.

ran: list[np.ndarray] = []


class Tap(eqxc.Layer):
    vmap_method = "fold"
    has_side_effect = True

    def kernel(self, ctx, out, x):
        ran.append(np.array(x))
        np.copyto(np.asarray(out), np.asarray(x))

    def reference(self, x):
        return x


class TapWithBackward(Tap):
    def backward(self, ctx, grads, args, out, cotangents):
        np.asarray(grads[1])[...] = np.asarray(cotangents)


class Log(eqxc.Layer):
    """No results at all."""

    vmap_method = "fold"

    has_side_effect = True

    def kernel(self, ctx, out, x):
        ran.append(np.array(x))

    def out_type(self, x):
        return None


def then(first, second):
    return second


def custom_vjp_of(e):
    @jax.custom_vjp
    def f(x):
        return then(e(x), x)

    f.defvjp(lambda x: (then(e(x), x), None), lambda _, g: (then(e(g), g),))
    return f


def custom_jvp_of(e):
    @jax.custom_jvp
    def f(x):
        return then(e(x), x)

    f.defjvp(lambda primals, tangents: (f(*primals), then(e(tangents[0]), tangents[0])))
    return f


# How often a kernel runs whose results are unused.
EFFECTS: dict[str, tuple[int, Any]] = {
    "unused": (1, lambda e: lambda x: then(e(x), x)),
    "equal calls": (2, lambda e: lambda x: then((e(x), e(x)), x)),
    "scan": (3, lambda e: lambda x: jax.lax.scan(lambda c, _: (then(e(x), c), None), x, length=3)[0]),
    "while": (
        3,
        lambda e: lambda x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, then(e(x), c[1])), (0, x)),
    ),
    "fori": (3, lambda e: lambda x: jax.lax.fori_loop(0, 3, lambda _, c: then(e(c), c), x)),
    "map": (2, lambda e: lambda x: jax.lax.map(lambda x: then(e(x), x), jnp.stack([x, x]))),
    "cond": (1, lambda e: lambda x: jax.lax.cond(x > 0, lambda x: then(e(x), x), lambda x: x, x)),
    "cond, other branch": (0, lambda e: lambda x: jax.lax.cond(x < 0, lambda x: then(e(x), x), lambda x: x, x)),
    "switch": (1, lambda e: lambda x: jax.lax.switch(1, [lambda x: x, lambda x: then(e(x), x)], x)),
    "nested jit": (1, lambda e: lambda x: jax.jit(lambda x: then(e(x), x))(x)),
    "checkpoint": (1, lambda e: jax.checkpoint(lambda x: then(e(x), x))),
    "grad": (1, lambda e: jax.grad(lambda x: then(e(x), jnp.sin(x)))),
    "grad of checkpoint": (1, lambda e: jax.grad(jax.checkpoint(lambda x: then(e(x), jnp.sin(x))))),
    "grad of scan": (
        3,
        lambda e: jax.grad(lambda x: jax.lax.scan(lambda c, _: (then(e(c), jnp.sin(c)), None), x, length=3)[0]),
    ),
    "jvp": (1, lambda e: lambda x: jax.jvp(lambda x: then(e(x), jnp.sin(x)), (x,), (x,))),
    "linearize": (1, lambda e: lambda x: jax.linearize(lambda x: then(e(x), jnp.sin(x)), x)[0]),
    "vjp": (1, lambda e: lambda x: jax.vjp(lambda x: then(e(x), jnp.sin(x)), x)[1](x)),
    # One call for the batch.
    "vmap": (1, lambda e: lambda x: jax.vmap(lambda x: then(e(x), x))(jnp.stack([x, x]))),
    "vmap of scan": (
        3,
        lambda e: (
            lambda x: jax.vmap(lambda x: jax.lax.scan(lambda c, _: (then(e(x), c), None), x, length=3)[0])(
                jnp.stack([x, x])
            )
        ),
    ),
    # Both branches run, as JAX has it: a mapped `cond` selects between their results.
    "vmap of cond": (
        1,
        lambda e: (
            lambda x: jax.vmap(lambda x: jax.lax.cond(x < 0, lambda x: then(e(x), x), lambda x: x, x))(
                jnp.stack([x, x])
            )
        ),
    ),
    "custom_vjp": (2, lambda e: jax.grad(custom_vjp_of(e))),
    "custom_jvp": (2, lambda e: lambda x: jax.jvp(custom_jvp_of(e), (x,), (x,))),
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("layer", [Tap(), TapWithBackward(), Log()], ids=lambda layer: type(layer).__name__)
@pytest.mark.parametrize("name", EFFECTS)
def test_effects(name, layer, jit):
    count, make = EFFECTS[name]
    ran.clear()
    f = make(layer)
    jax.block_until_ready((jax.jit(f) if jit else f)(jnp.float32(1)))
    jax.effects_barrier()
    assert len(ran) == count


@pytest.mark.parametrize("method", ["sequential", "sequential_unrolled"])
def test_effects_for_each_example(method):
    class Each(Tap):
        vmap_method = method

    ran.clear()
    jax.block_until_ready(jax.jit(jax.vmap(lambda x: then(Each()(x), x)))(X))
    assert sorted(map(float, ran)) == sorted(map(float, X))


def test_a_used_effect_under_checkpoint_has_the_right_gradient():
    for layer in (Tap(), TapWithBackward()):
        f = jax.grad(jax.checkpoint(lambda x, layer=layer: jnp.sin(layer(jnp.sin(x)))))
        want = jax.grad(lambda x: jnp.sin(jnp.sin(x)))(0.5)
        for g in (f, jax.jit(f)):
            ran.clear()
            assert_close(g(jnp.float32(0.5)), want)
            assert ran


def test_without_an_effect_unused_and_equal_calls_go():
    class Quiet(Tap):
        has_side_effect = False

    ran.clear()
    jax.block_until_ready(jax.jit(lambda x: then(Quiet()(x), x))(X))
    assert ran == []
    jax.block_until_ready(jax.jit(lambda x: Quiet()(x) + Quiet()(x))(X))
    assert len(ran) == 1


def test_a_failing_effect_in_a_loop():
    class Fails(Tap):
        def kernel(self, ctx, out, x):
            raise KeyError("in a loop")

    f = jax.jit(lambda x: jax.lax.scan(lambda c, _: (then(Fails()(c), c), None), x, length=3)[0])
    with pytest.raises(eqxc.KernelError, match="in a loop"), eqxc.raising():
        jax.block_until_ready(f(X))
