"""Taps in programs of several devices: once for each of them with its part, or once with all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from eqxcallback import debug

from .watching import BATCH


P = jax.P
WHOLE = np.arange(16.0, dtype=np.float32).reshape(4, 4)


def mesh_of(kind):
    return jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind,) * 2, devices=jax.devices()[:4])


@pytest.fixture
def grid():
    return mesh_of(AxisType.Auto)


@pytest.fixture
def x(grid):
    return jax.device_put(WHOLE, jax.NamedSharding(grid, P("a", "b")))


def calls_of(seen, program, *args):
    """`(device id, value, transforms)`, sorted by device."""
    jax.block_until_ready(program(*args))
    return sorted(((device.id, value, transforms) for value, transforms, device in seen.taken()), key=lambda c: c[0])


def parts(calls, rows=2, columns=2):
    """Each of four devices was called once, with its part of `WHOLE`."""
    assert [device for device, _, _ in calls] == [0, 1, 2, 3]
    for device, value, _ in calls:
        i, j = divmod(device, 2)
        expected = WHOLE[2 * i : 2 * i + rows, (2 * j if columns == 2 else 0) :][:, :columns]
        np.testing.assert_array_equal(value, expected)


def tap(seen, **options):
    return lambda x: debug.tap(seen, x, with_device=True, **options)


def test_each_part(seen, x):
    parts(calls_of(seen, jax.jit(lambda x: (tap(seen)(x), x + 1)[1]), x))
    parts(calls_of(seen, jax.jit(lambda x: (tap(seen)(x), None)[1]), x))
    parts(calls_of(seen, jax.jit(lambda x: tap(seen)(x * 1).sum()), x))
    parts(calls_of(seen, tap(seen), x))  # eager


def test_each_leaf_stays_split_as_it_is(seen, grid, x):
    rows = jax.device_put(WHOLE, jax.NamedSharding(grid, P("a")))
    text = jax.jit(lambda x, y: tap(seen)((x, y))).lower(x, rows).compile().as_text()
    assert text is not None
    assert "all-gather" not in text
    calls = calls_of(seen, jax.jit(lambda x, y: tap(seen)((x, y))), x, rows)
    parts([(device, value[0], t) for device, value, t in calls])
    parts([(device, value[1], t) for device, value, t in calls], columns=4)


def test_what_is_not_split_evenly_is_whole(seen, x):
    calls = calls_of(seen, jax.jit(lambda x: tap(seen)(x.sum(1)[:3])), x)
    assert [(device, value.tolist()) for device, value, _ in calls] == [(i, [6, 22, 38]) for i in range(4)]


def test_scan_and_grad(seen, x):
    f = lambda x: jax.lax.scan(lambda c, _: (tap(seen)(c), None), x, None, length=3)[0].sum()
    for program in (f, jax.grad(f)):
        calls = calls_of(seen, jax.jit(program), x)
        assert [device for device, _, _ in calls] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
        parts(calls[::3])
    tapped = lambda x: (debug.tap_cotangents(seen, x, with_device=True) * x).sum()
    calls = calls_of(seen, jax.jit(jax.grad(tapped)), x)
    assert all(transforms == (("transpose", {}),) for _, _, transforms in calls)
    parts(calls)


def test_vmap(seen, x):
    calls = calls_of(seen, jax.jit(jax.vmap(tap(seen))), x)
    parts(calls)
    assert all(transforms == (BATCH,) for _, _, transforms in calls)


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
def test_one_device_has_all(seen, x, index, ordered):
    for program in (jax.jit(tap(seen, device_index=index, ordered=ordered)), tap(seen, device_index=index)):
        ((device, value, _),) = calls_of(seen, program, x)
        assert device == index
        np.testing.assert_array_equal(value, WHOLE)


def test_a_device_that_is_not_there(seen, x):
    with pytest.raises(ValueError, match="expected device_index to be one of the 4 devices of the program; got 4"):
        jax.jit(tap(seen, device_index=4)).lower(x)


def test_order(seen, x):
    """By itself, device 0 with all of it."""

    def program(x):
        for i in range(5):
            tap(seen, ordered=True)((x, i))

    calls = []
    for _ in range(2):
        jax.jit(program)(x)
        calls += seen.taken()
    assert [int(value[1]) for value, _, _ in calls] == [*range(5)] * 2
    assert {device.id for _, _, device in calls} == {0}
    np.testing.assert_array_equal(calls[-1][0][0], WHOLE)


@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
def test_shard_map(seen, grid, x, ordered):
    over = lambda f: jax.shard_map(f, mesh=grid, in_specs=P("a", "b"), out_specs=P("a", "b"))
    parts(calls_of(seen, jax.jit(over(lambda x: (tap(seen, ordered=ordered)(x), x)[1])), x))
    ((device, value, _),) = calls_of(seen, jax.jit(over(tap(seen, ordered=ordered, device_index=1))), x)
    assert device == 1
    np.testing.assert_array_equal(value, WHOLE[:2, 2:])
    body = lambda c, i: ((tap(seen, ordered=ordered)((c, i))[0]), None)
    scanned = over(lambda x: jax.lax.scan(body, x, jnp.arange(3))[0])
    calls = calls_of(seen, jax.jit(jax.grad(lambda x: scanned(x).sum())), x)
    parts([(device, value[0], t) for device, value, t in calls[::3]])
    assert [int(value[1]) for _, value, _ in calls] == [0, 1, 2] * 4  # in order on each device


def test_shard_map_over_some_axes(seen, grid, x):
    over = lambda f: jax.shard_map(f, mesh=grid, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
    calls = calls_of(seen, jax.jit(over(lambda x: (tap(seen)(x), x)[1])), x)
    assert [device for device, _, _ in calls] == [0, 1, 2, 3]
    with pytest.raises(NotImplementedError, match=r"ordered=True inside `jax.shard_map` over some axes"):
        jax.jit(over(tap(seen, ordered=True))).lower(x)


@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
def test_explicit_axes(seen, ordered):
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        x = jax.device_put(WHOLE, jax.NamedSharding(mesh, P("a", "b")))
        calls = calls_of(seen, jax.jit(jax.vmap(lambda x: tap(seen, ordered=ordered)(x) * 2)), x)
        if ordered:
            assert [(device, value.shape) for device, value, _ in calls] == [(0, (4, 4))]
        else:
            parts(calls)
        out = jax.jit(tap(seen, ordered=ordered))(x)
        assert jax.typeof(out).sharding.spec == P("a", "b")
        seen.taken()


def test_pmap(seen):
    values = np.arange(2.0)
    calls = calls_of(seen, jax.pmap(tap(seen)), values)
    assert [(device, float(value)) for device, value, _ in calls] == [(0, 0.0), (1, 1.0)]
