"""Taps under JAX's transformations: never lost, never called more often than the value is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning

from eqxcallback import debug

from .watching import BATCH


X = jnp.arange(3.0)
Y = jnp.arange(6.0).reshape(2, 3)


def equal(seen, expected):
    """The calls are the expected ones, each `(value, transforms)`."""
    calls = seen.taken()
    assert [transforms for _, transforms in calls] == [transforms for _, transforms in expected]
    for (value, _), (wanted, _) in zip(calls, expected, strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), value, wanted)


def power3(x, seen, **options):
    y = x * x
    debug.tap(seen, (x, y), **options)
    return y * x


@pytest.fixture(params=[False, True], ids=["unordered", "ordered"])
def ordered(request):
    return request.param


def test_vmap_is_one_call(seen):
    jax.jit(jax.vmap(lambda x: power3(x, seen)))(X)
    equal(seen, [((X, X**2), (("batch", {"batch_dims": (0, 0)}),))])
    jax.vmap(lambda x: debug.tap(seen, (2.0, x)), in_axes=1)(Y)
    equal(seen, [((2.0, Y), (("batch", {"batch_dims": (None, 1)}),))])


def test_vmap_of_nothing_that_is_mapped(seen):
    jax.vmap(lambda x: (debug.tap(seen, 2.0), x)[1])(X)
    equal(seen, [(2.0, ())])


def test_nested_vmap_has_one_entry_for_each_map(seen):
    f = jax.vmap(jax.vmap(lambda x, y: debug.tap(seen, (x, x + y)), in_axes=(0, None)), in_axes=(None, 0))
    x, y = jnp.arange(5), jnp.arange(3)
    jax.jit(f)(x, y)
    transforms = (("batch", {"batch_dims": (0, 0)}), ("batch", {"batch_dims": (None, 0)}))
    equal(seen, [((x, x[None] + y[:, None]), transforms)])


def test_vmap_of_loops(seen):
    def count(x):
        return jax.lax.while_loop(lambda x: debug.tap(seen, x, ordered=True) < 2, lambda x: x + 1, x)

    jax.jit(jax.vmap(count))(jnp.arange(3))
    calls = seen.taken()  # JAX goes on with what is at its end, and throws that away: see the first one
    assert [(int(value[0]), value.shape, transforms) for value, transforms in calls] == [
        (i, (3,), (BATCH,)) for i in range(3)
    ]


def test_vmap_with_an_axis_name(seen):
    jax.vmap(lambda x: jax.lax.psum(debug.tap(seen, x), "i"), axis_name="i")(X)
    equal(seen, [(X, (BATCH,))])


def test_grad_and_jvp_tap_values_once(seen):
    assert jax.grad(lambda x: power3(x, seen))(3.0) == 27
    equal(seen, [((3.0, 9.0), ())])
    jax.jvp(lambda x: power3(x, seen), (3.0,), (0.1,))
    equal(seen, [((3.0, 9.0), ())])
    jax.jit(jax.value_and_grad(jax.grad(lambda x: power3(x, seen))))(3.0)
    equal(seen, [((3.0, 9.0), ())])
    jax.linearize(lambda x: power3(x, seen), 3.0)[1](1.0)
    equal(seen, [((3.0, 9.0), ())])


@pytest.mark.parametrize("used", [False, True], ids=["unused", "used"])
def test_grad_of_what_only_passes(seen, used, ordered):
    def f(x):
        y = debug.tap(seen, x, ordered=ordered)
        return 2 * (y if used else x)

    assert jax.jit(jax.grad(f))(3.0) == 2
    equal(seen, [(3.0, ())])


def test_vmap_and_grad_in_both_orders(seen):
    batch = ("batch", {"batch_dims": (0, 0)})
    jax.vmap(jax.grad(lambda x: power3(x, seen)))(X)
    equal(seen, [((X, X**2), (batch,))])
    jax.grad(lambda x: jax.vmap(lambda x: power3(x, seen))(x).sum())(X)
    equal(seen, [((X, X**2), (batch,))])


def test_grad_of_scan_loses_nothing(seen, ordered):
    def loss(x):
        def body(carry, y):
            debug.tap(seen, (carry, y), ordered=ordered)
            return carry * 2, debug.tap(seen, carry + y, ordered=ordered)

        carry, ys = jax.lax.scan(body, x, jnp.arange(2.0))
        return carry + ys.sum()

    expected = [((1.0, 0.0), ()), (1.0, ()), ((2.0, 1.0), ()), (3.0, ())]
    for f in (loss, jax.grad(loss), jax.jit(jax.grad(loss)), jax.hessian(loss)):
        f(1.0)
        if f is jax.hessian:
            continue
        calls = seen.taken()
        assert len(calls) == (len(expected)), f
        values = sorted(str(jax.tree.map(float, value)) for value, _ in calls)
        assert values == sorted(str(jax.tree.map(float, value)) for value, _ in expected)


def test_values_that_do_not_change_are_tapped_in_each_turn(seen):
    """XLA does not move a value that a loop leaves as it is out of the loop with its tap."""
    w = jnp.float32(2)

    def loss(w, x):
        return jax.lax.scan(lambda c, _: (c * debug.tap(seen, w), None), x, None, length=3)[0]

    for f in (loss, jax.grad(loss), jax.grad(loss, argnums=1)):
        jax.jit(f)(w, 1.0)
        equal(seen, [(w, ())] * 3)


def test_checkpoint_taps_what_it_computes_again(seen):
    jax.grad(lambda x: power3(jax.checkpoint(lambda x: power3(x, seen))(x), seen))(3.0)
    equal(seen, [((3.0, 9.0), ()), ((27.0, 729.0), ()), ((3.0, 9.0), ())])


@pytest.mark.parametrize(
    ("policy", "times"),
    [("nothing_saveable", 2), ("dots_saveable", 2), ("everything_saveable", 1)],
)
@pytest.mark.parametrize("used", [False, True], ids=["unused", "used"])
def test_checkpoint_policies(seen, policy, times, used, ordered):
    def f(x):
        y = jnp.sin(x)
        tapped = debug.tap(seen, y, ordered=ordered)
        return jnp.sin(tapped if used else y)

    jax.jit(jax.grad(jax.checkpoint(f, policy=getattr(jax.checkpoint_policies, policy))))(1.0)
    equal(seen, [(np.sin(1.0), ())] * times)


def test_checkpoint_of_scan(seen):
    def loss(x):
        body = jax.checkpoint(lambda c, _: (jnp.sin(debug.tap(seen, c)), None))
        return jax.lax.scan(body, x, None, length=2)[0]

    jax.jit(jax.grad(loss))(1.0)
    equal(seen, [(1.0, ()), (np.sin(1.0), ()), (np.sin(1.0), ()), (1.0, ())])


def test_control_flow(seen, ordered):
    tap = lambda x: debug.tap(seen, x, ordered=ordered)
    f = lambda x: jax.lax.cond(x > 0, tap, lambda x: tap(-x) * 2, x)
    assert jax.jit(f)(3.0) == 3
    assert jax.jit(f)(-3.0) == 6
    equal(seen, [(3.0, ()), (3.0, ())])
    assert jax.jit(lambda x: jax.lax.while_loop(lambda x: tap(x) < 2, lambda x: x + 1, x))(0) == 2
    equal(seen, [(0, ()), (1, ()), (2, ())])
    assert jax.jit(lambda x: jax.lax.switch(x, [lambda: tap(5), lambda: tap(6)]))(1) == 6
    equal(seen, [(6, ())])
    jax.lax.fori_loop(0, 2, lambda i, x: tap(x + i), 1)  # eager
    equal(seen, [(1, ()), (2, ())])


def test_order(seen):
    """Taps of one thread, of one program and of two, without any other dependence."""

    @jax.jit
    def program(x):
        for i in range(20):
            debug.tap(seen, (i, jnp.sin(x).sum() * 0), ordered=True)

    for _ in range(3):
        program(X)
    assert [int(i) for i, _ in seen.values()] == [*range(20)] * 3


def test_tangents(seen):
    f = lambda x: jnp.sin(debug.tap_tangents(seen, x)) * 2
    np.testing.assert_allclose(jax.jit(f)(X), 2 * np.sin(X), rtol=1e-6)
    equal(seen, [])
    jax.jvp(f, (X,), (X + 1,))
    equal(seen, [(X + 1, (("jvp", {}),))])
    jax.jit(jax.vmap(lambda x, t: jax.jvp(f, (x,), (t,))))(X, X + 1)
    equal(seen, [(X + 1, (("jvp", {}), BATCH))])
    jax.jvp(jax.vmap(f), (X,), (X + 1,))
    equal(seen, [(X + 1, (BATCH, ("jvp", {})))])
    jax.grad(lambda x: f(x).sum())(X)  # has no tangents
    equal(seen, [])
    jax.jvp(lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0], (0.0,), (1.0,))
    equal(seen, [(1.0, (("jvp", {}),)), (2.0, (("jvp", {}),))])


def test_tangents_of_a_tree(seen):
    """Zeros where nothing is differentiated, and `None` where nothing can be."""
    f = lambda x: debug.tap_tangents(seen, {"x": x, "y": 2.0, "n": 3})["x"]
    assert jax.jvp(f, (1.0,), (5.0,)) == (1, 5)
    ((value, transforms),) = seen.taken()
    assert value == {"x": 5.0, "y": 0.0, "n": None}
    assert transforms == (("jvp", {}),)


def test_cotangents(seen):
    f = lambda x: (debug.tap_cotangents(seen, x * 3) ** 2).sum()
    np.testing.assert_allclose(jax.jit(jax.grad(f))(X), 18 * X)
    equal(seen, [(6 * X, (("transpose", {}),))])
    jax.jvp(f, (X,), (X,))
    jax.jit(f)(X)
    equal(seen, [])
    jax.vmap(jax.grad(f))(Y)
    equal(seen, [(6 * Y, (("transpose", {}), BATCH))])
    jax.jit(jax.grad(jax.checkpoint(f)))(X)
    equal(seen, [(6 * X, (("transpose", {}),))])
    hessian = jax.hessian(f)(X)
    np.testing.assert_allclose(hessian, 18 * np.eye(3))


def test_cotangents_of_a_scan(seen, ordered):
    body = lambda c, _: (debug.tap_cotangents(seen, c, ordered=ordered) * 2, None)
    jax.jit(jax.grad(lambda x: jax.lax.scan(body, x, None, length=3)[0]))(1.0)
    equal(seen, [(g, (("transpose", {}),)) for g in (2.0, 4.0, 8.0)])


def test_cotangents_of_a_tree(seen):
    """`None` for leaves by which nothing is differentiated."""

    def f(x, y):
        tree = debug.tap_cotangents(seen, {"x": x, "y": y, "n": 3, "unused": 2 * x})
        return tree["x"] * tree["y"] * tree["n"]

    assert jax.grad(f)(2.0, 5.0) == 15
    ((value, transforms),) = seen.taken()
    assert value == {"x": 15.0, "y": None, "n": None, "unused": 0.0}
    assert transforms == (("transpose", {}),)


def test_a_tap_of_a_tangent_is_one_of_its_cotangent(seen):
    """In a user's own rule, as the host_callback of old did it."""

    @jax.custom_jvp
    def f(x):
        return x * x

    @f.defjvp
    def rule(primals, tangents):
        return f(*primals), 3 * primals[0] * debug.tap(seen, tangents[0])

    jax.jvp(f, (2.0,), (1.0,))
    equal(seen, [(1.0, ())])
    assert jax.grad(f)(2.0) == 6
    equal(seen, [(6.0, (("transpose", {}),))])


def test_custom_vjp(seen):
    @jax.custom_vjp
    def f(x):
        return debug.tap(seen, x) * 2

    f.defvjp(lambda x: (f(x), x), lambda x, g: (debug.tap(seen, g * x),))
    f(3.0)
    equal(seen, [(3.0, ())])
    assert jax.jit(jax.grad(lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0]))(3.0) == 18
    equal(seen, [(3.0, ()), (6.0, ()), (6.0, ()), (18.0, ())])


def test_integers_and_float0(seen):
    def f(x, n):
        x, n = debug.tap(seen, (x, n))
        return x * n

    primal, tangent = jax.jvp(f, (2.0, 3), (0.5, np.zeros((), jax.dtypes.float0)))
    assert (primal, tangent) == (6, 1.5)
    equal(seen, [((2.0, 3), ())])
    assert jax.grad(f)(2.0, 3) == 3
    equal(seen, [((2.0, 3), ())])


def test_inside_custom_partitioning(mesh, seen):
    """A program of its own, whose host callbacks JAX drops."""

    def local(x):
        debug.tap(seen, x)
        return x + 1

    op = custom_partitioning(local)
    op.def_partition(
        partition=lambda mesh, args, result: (mesh, local, result.sharding, (args[0].sharding,)),
        sharding_rule="b -> b",
    )
    x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, jax.P("d")))
    np.testing.assert_array_equal(jax.jit(op)(x), np.arange(8) + 1)
    assert sorted(value.tolist() for value in seen.values()) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_disable_jit(seen):
    with jax.disable_jit():
        jax.jit(lambda x: jax.lax.scan(lambda c, _: (debug.tap(seen, c) + 1, None), x, None, length=2)[0])(0.0)
    equal(seen, [(0.0, ()), (1.0, ())])
