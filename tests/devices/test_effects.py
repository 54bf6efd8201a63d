"""`has_side_effect=True` on several devices: once for each device, whoever uses the results, and never lost."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from .layers import Scale, ScaleBackward, normal, put, spec_of, squares, twice


SIZE = 3
ran_on: list[int] = []  # the devices of calls, in their order


class Effect(Scale):
    has_side_effect = True

    def kernel(self, ctx, out, x):
        ran_on.append(ctx.device_ordinal)
        super().kernel(ctx, out, x)


class EffectBackward(ScaleBackward):
    has_side_effect = True

    def kernel(self, ctx, out, x):
        ran_on.append(ctx.device_ordinal)
        super().kernel(ctx, out, x)


class NoResult(eqxc.Layer):
    vmap_method = "fold"
    has_side_effect = True

    def kernel(self, ctx, out, *args):
        ran_on.append(ctx.device_ordinal)

    def out_type(self, *args):
        return None


class OneResult(eqxc.Layer):
    vmap_method = "fold"
    has_side_effect = True

    def kernel(self, ctx, out):
        ran_on.append(ctx.device_ordinal)
        out.write(np.float32(1))

    def out_type(self):
        return jax.ShapeDtypeStruct((), jnp.float32)


def note(ctx, out, *args):
    ran_on.append(ctx.device_ordinal)
    for buffer in jax.tree.leaves(out):
        buffer.write(np.zeros(buffer.shape, buffer.dtype))


def callback(*shape, vmap_method=None):
    """With a result of this shape, or none."""
    result = jax.ShapeDtypeStruct(shape, jnp.float32) if shape else None
    return eqxc.buffer_callback(note, result, has_side_effect=True, vmap_method=vmap_method)


@pytest.fixture(autouse=True)
def nothing_ran():
    ran_on.clear()


@pytest.fixture
def x(grid):
    return put(normal(4, 2, SIZE), grid, "a")


def times(count, function, *args) -> Any:
    """The program calls the kernel so often on each device, cold and warm."""
    program, result = jax.jit(function), None
    for _ in range(2):
        ran_on.clear()
        result = jax.block_until_ready(program(*args))
        jax.effects_barrier()
        assert sorted(ran_on) == sorted([*range(4)] * count)
    return result


@pytest.mark.parametrize("cls", [Effect, EffectBackward])
def test_a_layer(cls, x, grid):
    call = twice(lambda w, x: cls(w)(x))
    w = normal(SIZE)
    result = times(1, call, w, x)
    assert spec_of(result) == jax.P("a")
    assert spec_of(times(1, lambda w, x: (call(w, x), x + 1)[1], w, x)) == jax.P("a")
    times(1, lambda w, x: (call(w, x), None)[1], w, x)
    times(1, lambda w, x: (cls(w)(x[0, 0]), x)[1], w, x)  # nothing to split
    times(2, lambda w, x: (call(w, x), call(w, x), x)[2], w, x)  # equal, and not merged
    times(3, lambda w, x: jax.lax.scan(lambda c, _: ((call(w, c), c)[1], None), x, None, length=3)[0], w, x)
    loop = lambda w, x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, (call(w, c[1]), c[1])[1]), (0, x))
    times(3, loop, w, x)
    times(1, lambda w, x: jax.lax.cond(x.sum() > -1e9, lambda x: (call(w, x), x)[1], lambda x: x, x), w, x)
    times(0, lambda w, x: jax.lax.cond(x.sum() < -1e9, lambda x: (call(w, x), x)[1], lambda x: x, x), w, x)
    times(1, jax.grad(squares(call)), w, x)
    times(1, lambda w, x: (jax.grad(squares(call))(w, x), x)[1], w, x)
    times(1, lambda w, x: (call(w, x), x)[1], w, put(normal(0, 2, SIZE), grid, "a"))  # of nothing


def test_on_one_device(x):
    one = jax.device_put(normal(4, 2, SIZE), jax.devices()[2])
    jax.block_until_ready(jax.jit(lambda x: (jax.vmap(jax.vmap(Effect(normal(SIZE))))(x), x)[1])(one))
    assert ran_on == [2]


@pytest.mark.parametrize("axis_names", [{"a", "b"}, {"a"}], ids=["full", "partial"])
def test_inside_shard_map(x, grid, axis_names):
    over = lambda f: jax.shard_map(f, mesh=grid, in_specs=jax.P("a"), out_specs=jax.P("a"), axis_names=axis_names)
    layer = jax.vmap(jax.vmap(Effect(normal(SIZE))))
    for effect in (layer, NoResult(), callback(), callback(2, 2, SIZE)):
        times(1, over(lambda x, f=effect: (f(x), x)[1]), x)
        times(3, over(lambda x, f=effect: jax.lax.scan(lambda c, _: ((f(c), c)[1], None), x, None, length=3)[0]), x)


def test_a_callback(x):
    with_result, without = callback(*x.shape), callback()
    times(1, lambda x: with_result(x) + x, x)
    for effect in (with_result, without):
        times(1, lambda x, f=effect: (f(x), x)[1], x)
        times(1, lambda x, f=effect: (f(x), None)[1], x)
        times(3, lambda x, f=effect: jax.lax.scan(lambda c, _: ((f(c), c)[1], None), x, None, length=3)[0], x)
        times(1, lambda x, f=effect: jax.lax.cond(x.sum() > -1e9, lambda x: (f(x), x)[1], lambda x: x, x), x)
    for method, count in (("sequential", 4), ("expand_dims", 1), ("broadcast_all", 1)):
        for shape in ((2, SIZE), ()):
            mapped = jax.vmap(callback(*shape, vmap_method=method))
            times(count, lambda x, f=mapped: (f(x), x)[1], x)


def test_without_results_or_operands(x):
    times(1, lambda x: (jax.vmap(NoResult())(x), x)[1], x)
    times(1, lambda x: (NoResult()(), x)[1], x)
    times(1, lambda x: (OneResult()(), x)[1], x)
    np.testing.assert_allclose(times(1, lambda x: OneResult()() + x, x), 1 + normal(4, 2, SIZE))
    times(1, lambda x: (callback()(), x)[1], x)
    times(3, lambda x: jax.lax.scan(lambda c, _: ((NoResult()(), c)[1], None), x, None, length=3)[0], x)


def test_without_jit(x):
    """Eager calls on split operands."""
    for effect in (jax.vmap(jax.vmap(Effect(normal(SIZE)))), NoResult(), callback(*x.shape), callback()):
        ran_on.clear()
        jax.block_until_ready(effect(x))
        jax.effects_barrier()
        assert sorted(ran_on) == [0, 1, 2, 3]
