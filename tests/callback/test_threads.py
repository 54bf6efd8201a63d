"""Re-entrancy and threads: callbacks that run JAX, call callbacks, or run eight at a time."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from .kernels import add_one, callback_like


TIMEOUT = 60


def in_time(function, *args):
    """The result of `function`, or an error if it hangs. (A thread that hangs cannot be stopped: it is a daemon.)"""
    result = []

    def run():
        try:
            result.append((function(*args), None))
        except BaseException as error:
            result.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    assert result, "deadlock"
    value, error = result[0]
    if error is not None:
        raise error
    return value


MATRIX = jnp.eye(64) * 2.0


@jax.jit
def matmul_chain(x):
    for _ in range(4):
        x = x @ MATRIX
    return x.sum()


def runs_jax(ctx, out, x):
    out.write(np.asarray(matmul_chain(jnp.array(x))))


def twice(callback):
    f = callback_like(callback, jax.ShapeDtypeStruct((), jnp.float32))
    x = jnp.ones((64, 64))
    return f(x), jax.jit(f)(x), jax.jit(lambda x: f(x @ MATRIX))(x)


def test_a_callback_may_run_jax():
    eager, jitted, after_matmul = in_time(twice, runs_jax)
    assert float(eager) == float(jitted) == 64 * 64 * 16
    assert float(after_matmul) == 64 * 64 * 32


def test_a_callback_may_call_callbacks():
    inner = callback_like(add_one, jax.ShapeDtypeStruct((3,), jnp.float32))

    def outer(ctx, out, x):
        value = jnp.array(x)
        out.write(np.asarray(inner(value) + jax.jit(inner)(value)))

    f = callback_like(outer, jax.ShapeDtypeStruct((3,), jnp.float32))
    np.testing.assert_array_equal(in_time(lambda: f(jnp.zeros(3))), [2, 2, 2])
    np.testing.assert_array_equal(in_time(lambda: jax.jit(lambda x: f(x) + f(x + 1))(jnp.zeros(3))), [6, 6, 6])


def test_a_callback_may_call_itself():
    def countdown(ctx, out, x):
        n = int(np.asarray(x))
        out.write(np.asarray(n + int(f(jnp.int32(n - 1))) if n else 0, np.int32))

    f = callback_like(countdown, jax.ShapeDtypeStruct((), jnp.int32))
    assert int(in_time(lambda: f(jnp.int32(10)))) == 55
    assert int(in_time(lambda: jax.jit(f)(jnp.int32(10)))) == 55


def test_a_callback_may_wait_for_a_pending_array():
    @jax.jit
    def slow(x):
        return jax.lax.fori_loop(0, 200, lambda _, y: jnp.tanh(y @ MATRIX), x)

    pending = slow(jnp.ones((64, 64)))

    def callback(ctx, out, x):
        out.write(np.asarray(pending) + np.asarray(x))

    f = jax.jit(callback_like(callback, pending))
    np.testing.assert_array_equal(in_time(lambda: f(jnp.zeros((64, 64)))), pending)


def test_a_callback_may_wait_for_an_eager_call_of_another_thread():
    """Both have the same result type, and neither has been compiled."""
    like = jax.ShapeDtypeStruct((3, 1, 7), jnp.float32)
    inner, y = callback_like(add_one, like), jnp.zeros((3, 1, 7))

    def outer(ctx, out, x):
        with ThreadPoolExecutor(1) as pool:
            out.write(np.asarray(pool.submit(inner, y).result(TIMEOUT)))

    np.testing.assert_array_equal(in_time(lambda: callback_like(outer, like)(y)), np.ones((3, 1, 7)))


def test_callbacks_of_two_threads_may_meet():
    like = jax.ShapeDtypeStruct((1, 2, 5), jnp.float32)
    both = threading.Barrier(2)

    def kernel(ctx, out, x):
        both.wait(TIMEOUT)
        out.write(x)

    f, x = callback_like(kernel, like), jnp.zeros((1, 2, 5))

    def meet():
        with ThreadPoolExecutor(2) as pool:
            return [future.result(TIMEOUT) for future in [pool.submit(f, x), pool.submit(f, x)]]

    assert len(in_time(meet)) == 2


@pytest.mark.parametrize("jit", [False, True])
def test_eight_threads(jit):
    def callback(ctx, out, x, y):
        np.add(x, y, out=np.asarray(out))

    f = eqxc.buffer_callback(callback, jax.ShapeDtypeStruct((100,), jnp.float32))
    f = jax.jit(f) if jit else f

    def work(seed):
        x = jnp.full(100, float(seed))
        for i in range(200):
            np.testing.assert_array_equal(f(x, jnp.full(100, float(i))), np.full(100, seed + i))
        return seed

    with ThreadPoolExecutor(8) as pool:
        assert in_time(lambda: list(pool.map(work, range(8)))) == list(range(8))


def test_eight_threads_that_run_jax():
    f = jax.jit(callback_like(runs_jax, jax.ShapeDtypeStruct((), jnp.float32)))

    def work(seed):
        x = jnp.full((64, 64), float(seed))
        return [float(f(x)) for _ in range(20)] == [seed * 64 * 64 * 16.0] * 20

    with ThreadPoolExecutor(8) as pool:
        assert all(in_time(lambda: list(pool.map(work, range(8)))))


def test_eight_threads_of_which_some_fail():
    def callback(ctx, out, x):
        value = np.asarray(x)
        if int(value[0]) % 2:
            raise ValueError(f"odd {int(value[0])}")
        out.write(value)

    f = callback_like(callback, jax.ShapeDtypeStruct((3,), jnp.float32))

    def work(seed):
        for _ in range(100):
            if seed % 2:
                with pytest.raises(eqxc.KernelError, match=f"odd {seed}") as caught:
                    f(jnp.full(3, float(seed)))
                assert str(caught.value.original) == f"odd {seed}"
            else:
                np.testing.assert_array_equal(f(jnp.full(3, float(seed))), np.full(3, seed))
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(in_time(lambda: list(pool.map(work, range(8)))))


def test_callbacks_on_several_devices_at_once(mesh):
    f = callback_like(runs_jax, jax.ShapeDtypeStruct((), jnp.float32))
    x = jax.device_put(jnp.ones((256, 64)), jax.NamedSharding(mesh, jax.P("d")))
    mapped = jax.jit(jax.shard_map(lambda x: f(x)[None], mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d")))
    np.testing.assert_array_equal(in_time(lambda: np.asarray(mapped(x))), np.full(4, 64 * 64 * 16.0))
