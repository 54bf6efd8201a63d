"""Taps in loops under `vmap`, where examples end at different times: right results, and one call in each turn."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqxcallback as eqxc
from eqxcallback import debug
from eqxcallback.compat import host_callback

from .watching import BATCH, Seen


X = jnp.arange(5)


def condition(tap, x):
    return lax.while_loop(lambda x: tap(x < 2), lambda x: x + 1, x)


def body(tap, x):
    return lax.while_loop(lambda x: x < 3, lambda x: tap(x + 1), x)


def condition_and_body(tap, x):
    return lax.while_loop(lambda x: tap(x) < 3, lambda x: tap(x + 1), x)


def cond_in_condition(tap, x):
    odd_or_even = lambda x: lax.cond(x % 2 == 0, lambda x: tap(x < 3), lambda x: tap(x < 4), x)
    return lax.while_loop(odd_or_even, lambda x: x + 1, x)


def scan_in_condition(tap, x):
    total = lambda x: lax.scan(lambda c, y: (tap(c + y), None), x, jnp.arange(3))[0]
    return lax.while_loop(lambda x: total(x) < 7, lambda x: x + 1, x)


def loop_in_condition(tap, x):
    count = lambda x: lax.while_loop(lambda i: tap(i < x), lambda i: i + 1, 0)
    return lax.while_loop(lambda x: count(x) < 3, lambda x: x + 1, x)


def loop_in_body(tap, x):
    count = lambda x: lax.while_loop(lambda i: tap(i < x), lambda i: i + 2, 0)
    return lax.while_loop(lambda x: tap(x < 6), lambda x: x + 1 + count(x), x)


def number_of_turns(tap, x):
    return lax.fori_loop(0, x, lambda i, c: tap(c + i), 0)


def turns_in_condition(tap, x):
    total = lambda x: lax.fori_loop(0, x, lambda i, c: tap(c + i), 0)
    return lax.while_loop(lambda x: total(x) < 7, lambda x: x + 1, x)


def jitted_condition(tap, x):
    return lax.while_loop(jax.jit(lambda x: tap(x < 3)), lambda x: x + 1, x)


def constant_of_the_condition(tap, x):
    return lax.while_loop(lambda s: tap(s[0] < x), lambda s: (s[0] + 1, s[1] * 2), (0, 1))


def same_end(tap, x):
    return lax.while_loop(lambda s: tap(s[0] < 3), lambda s: (s[0] + 1, s[1] + x), (0, x))


LOOPS = [
    condition,
    body,
    condition_and_body,
    cond_in_condition,
    scan_in_condition,
    loop_in_condition,
    loop_in_body,
    number_of_turns,
    turns_in_condition,
    jitted_condition,
    constant_of_the_condition,
    same_end,
]


def unchanged(x):
    return x


@pytest.fixture(params=["unordered", "ordered", "id_tap"])
def tap(request, seen):
    if request.param == "id_tap":
        return functools.partial(host_callback.id_tap, seen)
    return functools.partial(debug.tap, seen, ordered=request.param == "ordered")


def expected(loop, x):
    """One example after the other, without taps or `vmap`."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *[loop(unchanged, example) for example in x])


@pytest.mark.parametrize("loop", LOOPS)
def test_results(loop, tap):
    got = jax.jit(jax.vmap(functools.partial(loop, tap)))(X)
    jax.tree.map(np.testing.assert_array_equal, got, expected(loop, X))


def test_eager_results(tap):
    np.testing.assert_array_equal(jax.vmap(functools.partial(condition, tap))(X), [2, 2, 2, 3, 4])


@pytest.mark.parametrize("loop", [condition, turns_in_condition])
def test_nested_vmap(loop, tap):
    x = jnp.stack([X, X + 1])
    inner = jax.vmap(functools.partial(loop, tap))
    got = jax.jit(jax.vmap(inner, in_axes=1, out_axes=1))(x.T)
    np.testing.assert_array_equal(got.T, [expected(loop, row) for row in x])


@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
def test_one_call_in_each_turn(seen, ordered):
    jax.jit(jax.vmap(functools.partial(condition, functools.partial(debug.tap, seen, ordered=ordered))))(X)
    calls = seen.taken()
    assert [x.tolist() for x, _ in calls] == [(X + i < 2).tolist() for i in range(3)]
    assert all(transforms == (BATCH,) for _, transforms in calls)


@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
def test_a_known_number_of_turns(seen, ordered):
    """XLA drops the condition of such a loop."""
    tap = functools.partial(debug.tap, seen, ordered=ordered)
    assert jax.jit(lambda: lax.while_loop(lambda i: tap(i < 3), lambda i: i + 1, 0))() == 3
    assert [bool(x) for x in seen.values()] == [True, True, True, False]


def test_the_order_of_condition_and_body():
    seen = Seen()

    def loop(x):
        tap = lambda name, x: debug.tap(lambda x, _: seen((name, x.tolist()), ()), x, ordered=True)
        tap("before", x)
        x = lax.while_loop(lambda x: tap("second", tap("first", x < 2)), lambda x: tap("body", x + 1), x)
        tap("after", x)

    jax.jit(jax.vmap(loop))(jnp.array([0, 1]))
    assert seen.values() == [
        ("before", [0, 1]),
        *[("first", [True, True]), ("second", [True, True]), ("body", [1, 2])],
        *[("first", [True, False]), ("second", [True, False]), ("body", [2, 3])],
        *[("first", [False, False]), ("second", [False, False])],
        ("after", [2, 2]),
    ]


def test_what_no_map_touches_stays_so(seen):
    """The number of turns is the same for all examples: it has no axis, in the loop and after it."""

    def loop(x):
        i, x = same_end(functools.partial(debug.tap, seen, ordered=True), x)
        debug.tap(seen, i, ordered=True)
        return x

    jax.vmap(loop)(X)
    calls = seen.taken()
    assert [(x.tolist(), transforms) for x, transforms in calls] == [
        *[(going_on, ()) for going_on in (True, True, True, False)],
        (3, ()),
    ]


def test_derivatives(tap):
    """Derivatives of a mapped loop, and a mapped derivative of a loop."""
    f = lambda x: lax.while_loop(lambda x: tap(x) < 4, lambda x: x * x, x)
    x = jnp.array([1.5, 3.0, 5.0])
    slopes = [4 * 1.5**3, 6.0, 1.0]
    for g in (lambda x, t: jax.jvp(jax.vmap(f), (x,), (t,)), jax.vmap(lambda x, t: jax.jvp(f, (x,), (t,)))):
        values, tangents = jax.jit(g)(x, jnp.ones(3))
        np.testing.assert_allclose(values, [1.5**4, 9, 5], rtol=1e-6)
        np.testing.assert_allclose(tangents, slopes, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(jax.jacfwd(f))(x), slopes, rtol=1e-6)


def test_an_axis_name_and_keys(tap):
    def loop(tap, key, x):
        step = lambda state: (jax.random.split(state[0])[0], state[1] + 1)
        return lax.while_loop(lambda state: tap(state[1]) + lax.pmax(state[1], "i") < 6, step, (key, x))

    keys = jax.random.split(jax.random.key(0), 3)
    got, wanted = (
        jax.jit(jax.vmap(functools.partial(loop, tap), axis_name="i"))(keys, jnp.arange(3)) for tap in (tap, unchanged)
    )
    np.testing.assert_array_equal(got[1], wanted[1])
    np.testing.assert_array_equal(jax.random.key_data(got[0]), jax.random.key_data(wanted[0]))


def test_a_kernel_with_an_effect():
    calls = []

    def kernel(ctx, out, x):
        calls.append(np.array(x))
        out.write(np.asarray(x) < 2)

    def below(x):
        result = jax.ShapeDtypeStruct(x.shape, jnp.bool_)
        return eqxc.buffer_callback(kernel, result, has_side_effect=True, vmap_method="broadcast_all")(x)

    got = jax.jit(jax.vmap(lambda x: lax.while_loop(below, lambda x: x + 1, x)))(X)
    np.testing.assert_array_equal(got, [2, 2, 2, 3, 4])
    assert len(calls) == 3
