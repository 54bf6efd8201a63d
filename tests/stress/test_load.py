"""Many calls, many threads, many programs: nothing is lost, mixed up, leaked or hung."""

import collections
import functools
import itertools
import logging
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import xla

from ..callback.kernels import add_one, callback_like, like
from ..callback.test_threads import MATRIX, in_time, matmul_chain
from .attempt import attempt


X = jnp.zeros(3)
MIB = 2**20


class Shift(eqxc.Layer):
    amount: jax.Array
    vmap_method = "fold"

    def kernel(self, ctx, out, x):
        np.add(x, self.amount, out=np.asarray(out))

    def reference(self, x):
        return x + self.amount


def in_raising(call, argument):
    with eqxc.raising():
        return jax.block_until_ready(call(argument))


def test_eight_threads_of_two_thousand_calls():
    """In all ways to call a kernel; half of the threads share functions, the others have their own."""
    shared = callback_like(add_one, X, vmap_method="broadcast_all")
    counts = collections.Counter()

    def work(seed):
        f = (
            shared
            if seed % 2
            else callback_like(lambda ctx, out, x: add_one(ctx, out, x), X, vmap_method="broadcast_all")
        )
        layer = Shift(jnp.float32(1))
        x = jnp.full(3, float(seed))
        ways = [(f, x), (jax.jit(f), x), (jax.jit(jax.vmap(f)), x[None]), (layer, x), (jax.jit(layer.__call__), x)]
        for way, argument in itertools.islice(itertools.cycle(ways), 2000):
            assert np.asarray(way(argument)).ravel()[0] == seed + 1
            counts[seed] += 1

    with ThreadPoolExecutor(8) as pool:
        in_time(lambda: list(pool.map(work, range(8))))
    assert dict(counts) == dict.fromkeys(range(8), 2000)


def test_failing_calls_among_good_ones(caplog):
    """Each thread gets its own exceptions, all of them, and each is logged once."""

    class Odd(Exception):
        pass

    def kernel(ctx, out, x):
        value = int(np.asarray(x)[0])
        if value % 3 == 0:
            raise Odd(value)
        out.write(np.asarray(x))

    f = callback_like(kernel, X)
    jitted = jax.jit(f)

    def work(seed):
        failed = 0
        for number in range(seed * 1000, seed * 1000 + 150):
            argument = jnp.full(3, float(number))
            call = jitted if number % 2 else f
            result, error = attempt(functools.partial(in_raising, call, argument), eqxc.KernelError)
            if number % 3 == 0:
                assert isinstance(error, eqxc.KernelError)
                assert isinstance(error.original, Odd)
                assert error.original.args == (number,)
                failed += 1
            else:
                assert error is None
                assert result is not None
                assert result[0] == number
        return failed

    with caplog.at_level(logging.ERROR, "eqxcallback"), ThreadPoolExecutor(8) as pool:
        failed = sum(in_time(lambda: list(pool.map(work, range(8)))))
    assert failed == sum(number % 3 == 0 for seed in range(8) for number in range(seed * 1000, seed * 1000 + 150))
    assert len([record for record in caplog.records if record.name == "eqxcallback"]) == failed


@pytest.mark.parametrize("eager", [False, True])
def test_failures_that_others_raise_meanwhile_replace_none(eager):
    """As a slow thread sees it, while others fail many times and catch it."""

    class Odd(Exception):
        pass

    def kernel(ctx, out, x):
        raise Odd

    f = callback_like(kernel, X)
    jitted = jax.jit(f)

    def slow():
        try:
            jax.block_until_ready(jitted(X))
        except jax.errors.JaxRuntimeError as error:
            for _ in range(200):
                _, again = attempt(functools.partial(in_raising, f if eager else jitted, X), eqxc.KernelError)
                assert again is not None
            raise error

    with pytest.raises(eqxc.KernelError) as caught, eqxc.raising():
        slow()
    assert isinstance(caught.value.original, Odd)


def test_callbacks_that_run_jax_call_callbacks_and_wait():
    """Four threads, at random: a callback that runs a program, one that calls a callback, eager and under jit, or waits."""
    inner = callback_like(add_one, jax.ShapeDtypeStruct((), jnp.float32))
    inner_jit = jax.jit(inner)
    pending = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda _, y: jnp.tanh(y @ MATRIX), x))

    def runs_jax(x):
        return matmul_chain(x * MATRIX / 2) / 16  # 64 * 2 ** 4 / 16

    def waits(x):
        return jnp.asarray(np.asarray(pending(jnp.zeros((64, 64)) + 0 * x))[0, 0]) + x + 1

    ways = {"runs": (runs_jax, lambda v: v * 64), "waits": (waits, lambda v: v + 1)}
    ways |= {"calls": (inner, lambda v: v + 1), "calls a program": (inner_jit, lambda v: v + 1)}

    def kernel(ctx, out, x):
        value = jnp.array(x)
        way = list(ways.values())[int(value) % len(ways)][0]
        out.write(np.asarray(way(value)))

    outer = callback_like(kernel, jax.ShapeDtypeStruct((), jnp.float32))
    jitted = jax.jit(outer)

    def work(seed):
        choose = random.Random(seed)
        for _ in range(100):
            value = choose.randrange(20)
            want = list(ways.values())[value % len(ways)][1](value)
            assert float(choose.choice([outer, jitted])(jnp.float32(value))) == want

    with ThreadPoolExecutor(4) as pool:
        in_time(lambda: list(pool.map(work, range(4))))


def test_four_devices_of_which_one_fails(mesh):
    fail = threading.Event()

    class Sometimes(eqxc.Layer):
        vmap_method = "fold"

        def kernel(self, ctx, out, x):
            if fail.is_set() and ctx.device_ordinal == 2:
                raise ValueError("device two")
            np.multiply(x, np.float32(2), out=np.asarray(out))

        def reference(self, x):
            return x * 2

    x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, jax.P("d")))
    call = jax.jit(jax.vmap(Sometimes()))

    def work():
        for i in range(60):
            (fail.set if i % 3 == 0 else fail.clear)()
            if fail.is_set():
                with pytest.raises(eqxc.KernelError, match="device two"), eqxc.raising():
                    jax.block_until_ready(call(x))
            else:
                np.testing.assert_array_equal(call(x), 2 * np.arange(8.0))

    in_time(work)


def test_a_hundred_thousand_calls(growth, monkeypatch):
    monkeypatch.setattr(logging.getLogger("eqxcallback"), "propagate", False)  # pytest keeps what is logged
    f = callback_like(add_one, X)
    jitted = jax.jit(f)
    trees = eqxc.buffer_callback(lambda ctx, out, x: out[0].write(x["a"]), [like(X)])
    fails = callback_like(lambda ctx, out, x: 1 / 0, X)
    layer = Shift(jnp.float32(1))

    def work():
        for _ in range(12_000):
            jitted(X)
            f(X)
            trees({"a": X})
            layer(X)
        for _ in range(2_000):
            with pytest.raises(eqxc.KernelError):
                fails(X)

    assert growth(work) < 4 * MIB


def test_a_thousand_traces(growth):
    """In two rounds of 500. Each of a function of its own, which a handle holds. Nothing of them stays after `clear_caches`."""

    def work():
        for i in range(250):
            f = callback_like(lambda ctx, out, x, i=i: out.write(np.full(3, i, np.float32)), X)
            jax.jit(f).trace(X).lower()
            layer = type("OneOfAThousand", (Shift,), {})(jnp.float32(i))
            jax.make_jaxpr(jax.grad(lambda x, layer=layer: layer(x).sum()))(X)
        jax.clear_caches()

    assert growth(work) < 8 * MIB
    alive = [
        handle.owner for refs in xla.handles._handles._handles.values() for ref in refs if (handle := ref()) is not None
    ]
    assert [body for body in alive if "test_a_thousand_traces" in repr(body) or "OneOfAThousand" in repr(body)] == []
