"""`mode="async"`: a queue, a thread, and what barriers wait for."""

import math
import os
import subprocess
import sys
import textwrap
import threading
import time

import jax
import numpy as np
import pytest

from eqxcallback import debug

from .watching import Gate


X = np.arange(3, dtype=np.float32)


def later(fn, x):
    return debug.tap(fn, x, mode="async")


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "eqxcallback-taps"]


def test_the_program_goes_on(seen):
    gate = Gate()
    jax.block_until_ready(jax.jit(lambda x: later(gate, x) + 1)(X))
    assert gate.began.wait(30)
    later(seen, X)  # behind it
    with pytest.raises(
        TimeoutError, match=r"pending: 2 calls of tap functions: Gate \(1\), Seen \(1\); 24 bytes are queued"
    ):
        debug.barrier_wait("busy", timeout=0.05)
    gate.opened.set()
    np.testing.assert_array_equal(seen.values(), [X])


def test_the_timeout_of_a_sync_tap():
    gate = Gate()
    thread = threading.Thread(target=lambda: debug.tap(gate, X))
    thread.start()
    assert gate.began.wait(30)
    with pytest.raises(
        TimeoutError, match=r"barrier_wait\(now\): after 0 s pending: 1 calls of tap functions: Gate \(1\)"
    ):
        debug.barrier_wait("now", timeout=0)
    gate.opened.set()
    debug.barrier_wait(timeout=30)
    thread.join()


def test_values_are_copied_and_in_order(seen):
    @jax.jit
    def program(x):
        return jax.lax.scan(lambda c, _: (debug.tap(seen, c, mode="async", ordered=True) + 1, None), x, length=50)[0]

    program(0.0)
    program(100.0)
    assert [float(x) for x in seen.values()] == [*range(50), *range(100, 150)]


def test_the_queue_is_bounded(monkeypatch):
    monkeypatch.setenv("EQXCALLBACK_TAP_QUEUE_BYTES", "40")  # three values, and not four
    debug.shutdown()  # the next worker reads it
    gate, calls, returned = Gate(), [], []

    def program():
        for i in range(6):
            later(gate if i == 0 else lambda x, _: calls.append(x), X)
            returned.append(i)

    thread = threading.Thread(target=program)
    thread.start()
    assert gate.began.wait(30)
    while len(returned) < 3:
        time.sleep(0.01)
    time.sleep(0.1)
    assert returned == [0, 1, 2]
    assert calls == []
    gate.opened.set()
    thread.join(30)
    debug.barrier_wait()
    assert len(calls) == 5


def test_what_is_larger_than_the_queue_goes_alone(monkeypatch, seen):
    monkeypatch.setenv("EQXCALLBACK_TAP_QUEUE_BYTES", "1")
    debug.shutdown()
    for _ in range(3):
        later(seen, X)
    assert len(seen.values()) == 3


@pytest.mark.parametrize("text", ["many", "-1", "0"])
def test_a_limit_that_is_none(monkeypatch, text):
    monkeypatch.setenv("EQXCALLBACK_TAP_QUEUE_BYTES", text)
    debug.shutdown()
    with pytest.raises(Exception, match=f"EQXCALLBACK_TAP_QUEUE_BYTES to be a positive number of bytes; got '{text}'"):
        later(print, X)
    monkeypatch.undo()
    debug.barrier_wait(timeout=30)


def test_failures(seen):
    def broken(x, transforms):
        raise SystemExit(3) if x.ndim == 0 else ValueError("no")

    later(broken, X)
    later(broken, 1.0)
    later(seen, X)
    with pytest.raises(debug.CallbackException) as info:
        debug.barrier_wait()
    first, second = info.value.exceptions
    assert isinstance(first, ValueError)
    assert isinstance(second.__cause__, SystemExit)
    assert len(seen.values()) == 1  # the thread is alive, and nothing is raised again


def test_shutdown_and_restart(seen):
    for _ in range(3):
        assert not threads()
        later(seen, X)
        assert len(threads()) == 1
        debug.shutdown()
        assert not threads()
        assert len(seen.values()) == 1


def test_a_tap_inside_of_a_tap(monkeypatch, seen):
    """The worker does not wait for itself, also if the queue is full."""
    monkeypatch.setenv("EQXCALLBACK_TAP_QUEUE_BYTES", "1")
    debug.shutdown()
    later(lambda x, _: [later(seen, x) for _ in range(3)], X)
    assert len(seen.values()) == 3


def test_several_threads_and_barriers(seen):
    def work(number):
        for i in range(20):
            debug.tap(seen, np.int32(number * 100 + i), mode="async" if i % 2 else "sync")
        debug.barrier_wait()

    workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert sorted(map(int, seen.values())) == sorted(n * 100 + i for n in range(4) for i in range(20))


def run(code):
    """A process of its own; what it printed, and what went to stderr."""
    code = "import jax, os, time\nimport numpy as np\nfrom eqxcallback import debug\n" + textwrap.dedent(code)
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), done.stderr


def test_at_exit():
    """Everything is delivered, failures are shown, and nothing hangs; also for taps of other exit handlers."""
    out, err = run("""
        import atexit

        def slow(x, transforms):
            time.sleep(0.1)
            if x == 2:
                raise ValueError("the last one")
            print(int(x), flush=True)

        atexit.register(lambda: debug.tap(slow, 7, mode="async"))
        for i in range(3):
            jax.jit(lambda x: debug.tap(slow, x, mode="async"))(i)
    """)
    assert out == ["0", "1", "7"]
    assert "CallbackException: There were exceptions during callback processing" in err
    assert "ValueError: the last one" in err


def test_after_a_fork():
    """The child has neither the thread nor what was queued, and starts its own."""
    out, _ = run("""
        import threading, warnings
        warnings.simplefilter("ignore")
        opened = threading.Event()
        later = lambda fn, x: debug.tap(fn, x, mode="async")
        later(lambda x, t: opened.wait(30), 0)
        later(lambda x, t: print("parent", flush=True), 0)
        child = os.fork()
        if child == 0:
            debug.barrier_wait(timeout=10)
            from eqxcallback.debug._deliveries import deliveries
            deliveries().call_later("print", lambda: print("child", flush=True), 8)
            debug.barrier_wait(timeout=10)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        opened.set()
        debug.barrier_wait()
    """)
    assert out == ["child", "parent"]


@pytest.mark.parametrize("timeout", ["long", math.nan], ids=str)
def test_a_timeout_is_a_number(timeout):
    with pytest.raises(
        ValueError, match=rf"barrier_wait: expected timeout to be a number of seconds, or None; got .*{timeout}"
    ):
        debug.barrier_wait(timeout=timeout)
