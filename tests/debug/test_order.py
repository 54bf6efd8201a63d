"""Calls with `ordered=True` keep the order of the program, against taps and each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqxcallback import debug
from eqxcallback.compat import host_callback


class Log:
    def __init__(self):
        self._names = []

    def call(self, name, x=0.0, i=0):
        """A call that nothing depends on, and which depends on nothing that comes before it."""
        debug.call(lambda i: self._names.append(f"{name}{int(i)}"), i, result_shape=None, ordered=True)
        return x

    def tap(self, name, x=0.0, i=0):
        debug.tap(lambda i, _: self._names.append(f"{name}{int(i)}"), i, ordered=True)
        return x

    def on_host(self, name, value):
        """Return `value`, as a function on the host."""
        self._names.append(f"{name}0")
        return value

    def taken(self):
        debug.barrier_wait()
        names, self._names = self._names, []
        return names


@pytest.fixture
def log():
    return Log()


def test_calls_and_taps(log):
    """The order holds in one program and in the next ones, without any other dependence."""

    @jax.jit
    def program(x):
        for i in range(8):
            (log.tap if i % 3 else log.call)("n", x, i)
        return x + 1

    for _ in range(3):
        program(1.0)
    log.call("eager")
    assert log.taken() == [*(f"n{i}" for i in range(8))] * 3 + ["eager0"]


def test_results_are_those_without_order(log):
    f = lambda ordered: jax.jit(lambda x: debug.call(lambda x: x * 2, x, result_shape=x, ordered=ordered) + 1)
    x = jnp.arange(3.0)
    np.testing.assert_array_equal(f(True)(x), f(False)(x))


def test_compat():
    names = []

    @jax.jit
    def program(x):
        for i in range(8):
            if i % 3:
                host_callback.id_tap(lambda i, _: names.append(int(i)), i)
            else:
                host_callback.call(lambda i: names.append(int(i)), i)
        return x

    for _ in range(3):
        program(1.0)
    host_callback.barrier_wait()
    assert names == [*range(8)] * 3


def test_control_flow(log):
    def body(i, x):
        x = lax.cond(i % 2 == 0, lambda: log.call("even", x, i), lambda: log.tap("odd", x, i))
        return log.call("turn", x, i)

    jax.jit(lambda x: log.call("end", lax.fori_loop(0, 3, body, log.tap("begin", x))))(1.0)
    assert log.taken() == ["begin0", "even0", "turn0", "odd1", "turn1", "even2", "turn2", "end0"]

    def below(i):
        log.tap("condition", i=i)
        return debug.call(lambda i: np.bool_(i < 2), i, result_shape=True, ordered=True)

    jax.jit(lambda: lax.while_loop(below, lambda i: log.call("body", i, i) + 1, 0))()
    assert log.taken() == ["condition0", "body0", "condition1", "body1", "condition2"]


def test_derivatives(log):
    """A custom rule has calls forward and backward. `jax.checkpoint` keeps results of calls, and taps again."""

    @jax.custom_vjp
    def f(x):
        return log.call("value", x) * 2

    f.defvjp(lambda x: (log.call("forward", x) * 2, None), lambda _, g: (log.call("backward", g) * 2,))
    assert jax.jit(jax.grad(lambda x: log.tap("end", f(log.tap("begin", x)))))(3.0) == 2
    assert log.taken() == ["begin0", "forward0", "end0", "backward0"]

    def loss(x):
        x = log.tap("first", x)
        y = debug.call(lambda x: log.on_host("second", np.cos(x)), lax.stop_gradient(x), result_shape=x, ordered=True)
        return jnp.sin(log.tap("third", x * y))

    x = jnp.float32(1)
    wanted = np.cos(np.cos(x)) * np.cos(x)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x), wanted, rtol=1e-6)
    assert log.taken() == ["first0", "second0", "third0"]
    np.testing.assert_allclose(jax.jit(jax.grad(jax.checkpoint(loss)))(x), wanted, rtol=1e-6)
    assert log.taken() == ["first0", "second0", "third0", "first0", "third0"]

    turns = lambda x: lax.scan(
        lambda c, i: (jnp.sin(log.tap("tap", log.call("call", c, i), i)), None), x, jnp.arange(2)
    )[0]
    jax.jit(jax.grad(turns))(1.0)
    assert log.taken() == ["call0", "tap0", "call1", "tap1"]


def test_maps(log):
    """A call has no rule for `vmap`: it is given one, or mapped in turn. What no map touches is called once."""
    f = lambda x: debug.call(np.sin, x, result_shape=x, ordered=True)
    with pytest.raises(NotImplementedError, match="batching rules are implemented only for id_tap, not for call"):
        jax.vmap(f)(jnp.ones(3))
    jax.jit(lambda x: lax.map(lambda i: log.call("call", log.tap("tap", i, i), i), x))(jnp.arange(2))
    assert log.taken() == ["tap0", "call0", "tap1", "call1"]
    jax.jit(jax.vmap(lambda x: log.call("call", log.tap("tap", x, 1), 2)))(jnp.arange(2))
    assert log.taken() == ["tap1", "call2"]


def test_several_devices(mesh, log):
    """Each device has an order, and calls with the whole argument; inside `shard_map` with its part."""
    seen = {device: [] for device in range(4)}

    def host(x, *, device):
        seen[device.id].append(x.tolist())
        return x

    def f(x):
        for i in range(4):
            debug.call(host, x + i, result_shape=x, with_device=True, ordered=True)
        return x

    x = jax.device_put(jnp.arange(4), jax.NamedSharding(mesh, jax.P("d")))
    jax.block_until_ready(jax.jit(f)(x))
    debug.barrier_wait()
    assert all(seen[device] == [[i, i + 1, i + 2, i + 3] for i in range(4)] for device in seen)
    for calls in seen.values():
        calls.clear()
    jax.block_until_ready(jax.jit(jax.shard_map(f, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d")))(x))
    debug.barrier_wait()
    assert all(seen[device] == [[device + i] for i in range(4)] for device in seen)
