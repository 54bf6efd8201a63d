"""Failing callbacks: the original exception, one clear text, and nothing is hurt."""

import contextlib
import copy
import functools
import gc
import logging
import pickle
import re
import subprocess
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.errors import JaxRuntimeError

import eqxcallback as eqxc

from .kernels import add_one, callback_like


F32 = jax.ShapeDtypeStruct((2,), jnp.float32)


class Oops(Exception):
    """Not an exception that anybody else raises."""


def helper():
    raise Oops("the kernel is broken")


def broken(ctx, out, x):
    helper()


def test_eager_calls_raise_from_the_original():
    f = callback_like(broken, F32)
    for _ in range(2):  # JAX's own: another class when the program is already compiled
        with pytest.raises(eqxc.KernelError, match="the kernel is broken") as caught:
            f(jnp.zeros(2))
        error = caught.value
        assert isinstance(error, JaxRuntimeError)
        assert isinstance(error.original, Oops)
        assert error.__cause__ is error.original
        assert error.layer == "broken"
        assert error.operands == "(float32[2]) -> (float32[2])"
        assert error.name_stack == ""


@pytest.mark.parametrize("trees", [False, True])
def test_the_text_of_an_error(trees):
    """Right after JAX's prefix: name, name stack, lane and operands, then the user's own frames first."""

    def broken_tree(ctx, out, x):
        helper()

    f = callback_like(broken_tree if trees else broken, F32)
    name = broken_tree.__qualname__ if trees else "broken"
    argument = ([jnp.zeros(2)],) if trees else (jnp.zeros(2),)

    @jax.jit
    def step(x):
        with jax.named_scope("layer_3"):
            return f(x)

    with pytest.raises(JaxRuntimeError) as caught:
        jax.block_until_ready(step(*argument))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"INTERNAL: {name} in jit(step)/layer_3")
    assert re.search(r" failed; python lane, \(float32\[2\]\) -> \(float32\[2\]\) \[failure \d+\]$", lines[0])
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[2].startswith(f'  File "{__file__}"')
    assert f"in {'broken_tree' if trees else 'broken'}" in lines[2]
    assert "in helper" in str(caught.value)
    assert str(caught.value).rstrip().endswith("Oops: the kernel is broken")
    assert "eqxcallback/xla" not in str(caught.value)


def test_raising_chains_the_original_under_jit():
    f = jax.jit(callback_like(broken, F32))
    with pytest.raises(eqxc.KernelError) as caught, eqxc.raising():
        jax.block_until_ready(f(jnp.zeros(2)))
    assert isinstance(caught.value.original, Oops)
    assert "broken" in caught.value.name_stack or "jit" in caught.value.name_stack
    with pytest.raises(JaxRuntimeError) as caught:
        jax.block_until_ready(f(jnp.zeros(2)))
    assert not isinstance(caught.value, eqxc.KernelError)


def test_raising_leaves_other_errors_alone():
    with pytest.raises(ValueError, match="mine"), eqxc.raising():
        raise ValueError("mine")
    with eqxc.raising():
        np.testing.assert_array_equal(callback_like(add_one, F32)(jnp.zeros(2)), [1, 1])


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_interrupts_propagate(interrupt):
    def callback(ctx, out, x):
        raise interrupt("stop")

    f = callback_like(callback, F32)
    with pytest.raises(interrupt, match="stop"):
        f(jnp.zeros(2))
    with pytest.raises(interrupt, match="stop"), eqxc.raising():
        jax.block_until_ready(jax.jit(f)(jnp.zeros(2)))
    with pytest.raises(JaxRuntimeError, match=interrupt.__name__):
        jax.block_until_ready(jax.jit(f)(jnp.zeros(2)))


def test_the_outer_callback_is_to_blame_for_an_inner_one():
    inner = callback_like(broken, F32)

    def outer(ctx, out, x):
        inner(jnp.array(x))

    with pytest.raises(eqxc.KernelError) as caught:
        callback_like(outer, F32)(jnp.zeros(2))
    assert caught.value.layer.endswith("outer")
    assert isinstance(caught.value.original, eqxc.KernelError)
    assert isinstance(caught.value.original.original, Oops)


def test_raising_does_not_replace_the_users_own_exception():
    class Mine(Exception):
        pass

    f = jax.jit(callback_like(broken, F32))

    def step():
        try:
            jax.block_until_ready(f(jnp.zeros(2)))
        except JaxRuntimeError as error:
            raise Mine(f"step 7 failed: {error}") from error

    with pytest.raises(Mine), eqxc.raising():
        step()


def test_the_exception_is_that_of_its_own_call():
    """Two calls fail with the same text at the same time; and one after the other inside one `raising()`."""
    both = threading.Barrier(2)

    class Named(Exception):
        def __init__(self, thread):
            super().__init__("the same text")
            self.thread = thread

    def kernel(ctx, out, x):
        both.wait(20)
        raise Named(threading.get_ident())

    callback_like(add_one, F32)(jnp.zeros(2))
    f = callback_like(kernel, F32)
    owners = []

    def work():
        for _ in range(20):
            with pytest.raises(eqxc.KernelError) as caught:
                f(jnp.zeros(2))
            assert isinstance(caught.value.original, Named)
            owners.append(caught.value.original.thread == threading.get_ident())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert owners == [True] * 40

    count = []

    def counted(ctx, out, x):
        count.append(None)
        raise Named(len(count))

    g = jax.jit(callback_like(counted, F32))

    def twice():
        with pytest.raises(JaxRuntimeError):
            jax.block_until_ready(g(jnp.zeros(2)))
        jax.block_until_ready(g(jnp.zeros(2)))

    with pytest.raises(eqxc.KernelError) as caught, eqxc.raising():
        twice()
    assert isinstance(caught.value.original, Named)
    assert caught.value.original.thread == 2


@pytest.mark.parametrize("text", ["a\0b", "\ud800", "Grüße 🎉", "%s {}", "x" * 100_000])
def test_texts_that_xla_could_not_carry(text):
    def kernel(ctx, out, x):
        raise Oops(text)

    with pytest.raises(eqxc.KernelError) as caught:
        callback_like(kernel, F32)(jnp.zeros(2))
    assert caught.value.original.args == (text,)

    def interrupted(ctx, out, x):
        raise KeyboardInterrupt(text)

    with pytest.raises(KeyboardInterrupt):
        callback_like(interrupted, F32)(jnp.zeros(2))


def test_an_exception_without_a_text():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("even this fails")

    def kernel(ctx, out, x):
        raise Mute

    with pytest.raises(eqxc.KernelError) as caught:
        callback_like(kernel, F32)(jnp.zeros(2))
    assert isinstance(caught.value.original, Mute)
    assert "Mute" in str(pickle.loads(pickle.dumps(caught.value)).original)


def test_pickle_and_copy():
    with pytest.raises(eqxc.KernelError) as caught:
        callback_like(broken, F32)(jnp.zeros(2))
    caught.value.add_note("in the second step")
    for twin in (pickle.loads(pickle.dumps(caught.value)), copy.copy(caught.value)):
        assert twin.__notes__ == ["in the second step"]
        assert str(twin) == str(caught.value)
        assert (twin.layer, twin.operands) == ("broken", caught.value.operands)
        assert isinstance(twin.original, Oops)
        assert twin.__cause__ is twin.original

    class Local(Exception):
        pass

    def kernel(ctx, out, x):
        raise Local("not to be pickled")

    with pytest.raises(eqxc.KernelError) as caught:
        callback_like(kernel, F32)(jnp.zeros(2))
    twin = pickle.loads(pickle.dumps(caught.value))
    assert "Local: not to be pickled" in str(twin.original)


def test_debug_nans():
    f = callback_like(lambda ctx, out, x: out.write(np.full(2, np.nan, np.float32)), F32)
    with jax.debug_nans(True):
        for g in (f, jax.jit(f)):
            with pytest.raises(FloatingPointError, match=r"invalid value \(nan\)"):
                g(jnp.zeros(2))
        np.testing.assert_array_equal(callback_like(add_one, F32)(jnp.zeros(2)), [1, 1])


def test_transfer_guard():
    f, x = callback_like(add_one, F32), jnp.zeros(2)
    on_second = jax.device_put(x, jax.devices("cpu")[1])
    with jax.transfer_guard("disallow"):
        f(x)
        assert f(on_second).devices() == on_second.devices()


def test_results_are_committed_as_the_arguments_are():
    f = callback_like(add_one, F32)
    assert not f(jnp.zeros(2)).committed
    assert f(jax.device_put(jnp.zeros(2), jax.devices("cpu")[0])).committed


@pytest.mark.parametrize("how", ["eager", "jit", "raising", "raising eager", "twice"])
def test_logged_once(how, caplog):
    f = callback_like(broken, F32)
    jit = jax.jit(lambda x: f(f(x))) if how == "twice" else jax.jit(f)  # the second call never runs
    listening = eqxc.raising() if "raising" in how else contextlib.nullcontext()
    error = JaxRuntimeError if how in ("jit", "twice") else eqxc.KernelError
    with caplog.at_level(logging.DEBUG, "eqxcallback"), pytest.raises(error), listening:
        jax.block_until_ready((f if "eager" in how else jit)(jnp.zeros(2)))
    records = [r for r in caplog.records if r.name == "eqxcallback"]
    assert len(records) == 1
    assert "the kernel is broken" in records[0].getMessage()


def test_the_library_prints_nothing():
    """XLA logs for itself, past `sys.stderr`; and pytest's own handlers would hide that nobody configured logging."""
    code = (
        "import io, sys, jax, jax.numpy as jnp, eqxcallback as eqxc\n"
        "def broken(ctx, out): raise ValueError\n"
        "f = eqxc.buffer_callback(broken, jax.ShapeDtypeStruct((2,), jnp.float32))\n"
        "sys.stdout, sys.stderr, stderr = io.StringIO(), io.StringIO(), sys.stderr\n"
        "try: f()\n"
        "except eqxc.KernelError: printed = sys.stdout.getvalue() + sys.stderr.getvalue()\n"
        "sys.stderr = stderr\n"
        "assert printed == '', printed\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_next_call_is_right():
    calls = []

    def sometimes(ctx, out, x):
        calls.append(None)
        if len(calls) % 2:
            raise Oops("odd")
        add_one(ctx, out, x)

    f = callback_like(sometimes, F32)
    for g in (f, jax.jit(f)):
        for _ in range(5):
            with pytest.raises(JaxRuntimeError, match="odd"):
                jax.block_until_ready(g(jnp.zeros(2)))
            np.testing.assert_array_equal(g(jnp.zeros(2)), [1, 1])


def test_a_failure_inside_a_loop_ends_the_program():
    calls = []

    def callback(ctx, out, x):
        calls.append(None)
        if len(calls) == 3:
            raise Oops("third")
        add_one(ctx, out, x)

    f = callback_like(callback, F32)
    with pytest.raises(JaxRuntimeError, match="third"):
        jax.block_until_ready(jax.jit(lambda x: jax.lax.fori_loop(0, 9, lambda _, x: f(x), x))(jnp.zeros(2)))
    assert len(calls) == 3


def test_nothing_of_a_failure_is_kept():
    """Tracebacks hold frames, and frames hold arrays."""

    class Big:
        pass

    def make():
        big = Big()

        def callback(ctx, out, x):
            local = big
            raise Oops(local is None)

        return callback, weakref.ref(big)

    callback, watch = make()

    f = callback_like(callback, F32)
    with pytest.raises(eqxc.KernelError):
        f(jnp.zeros(2))
    with pytest.raises(JaxRuntimeError):
        jax.block_until_ready(jax.jit(f)(jnp.zeros(2)))
    del f, callback
    jax.clear_caches()
    gc.collect()
    assert watch() is None


def test_a_result_is_refused():
    f = callback_like(lambda ctx, out, x: np.asarray(x), F32)
    with pytest.raises(eqxc.KernelError, match=r"must return None, .* <class 'numpy.ndarray'>. Write with out.write"):
        f(jnp.zeros(2))
    f = callback_like(lambda ctx, out, x: 1, F32)
    with pytest.raises(eqxc.KernelError, match="must return None"):
        f([jnp.zeros(2)])


def test_names_in_errors():
    class Kernel:
        def func(self):
            """Not what is called."""

        def __call__(self, ctx, out, x):
            raise Oops

        def method(self, ctx, out, x):
            raise Oops

    for callback, name in (
        (Kernel(), Kernel.__qualname__),
        (Kernel().method, Kernel.method.__qualname__),
        (functools.partial(broken), "broken"),
        (functools.partial(functools.partial(broken)), "broken"),
    ):
        with pytest.raises(eqxc.KernelError) as caught:
            callback_like(callback, F32)(jnp.zeros(2))
        assert caught.value.layer == name


def test_a_failed_input_is_its_own_error():
    """An eager call on an array whose computation failed does not claim that failure, and the callback never runs."""
    calls = []
    f = callback_like(lambda ctx, out, x: calls.append(1), F32)
    with pytest.raises(JaxRuntimeError, match="the kernel is broken"):
        jax.block_until_ready(f(jax.jit(callback_like(broken, F32))(jnp.zeros(2))))
    assert calls == []
