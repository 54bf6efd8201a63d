"""Identity and lifetime: the same callback is one program; a callback lives exactly as long as what can call it."""

import contextlib
import dataclasses
import functools
import gc
import threading
import time
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import _ext

from .kernels import add_one, callback_like, like


X = jnp.zeros(3)


class Callback:
    """Can be watched, unlike a plain function's closure."""

    def __call__(self, ctx, out, x):
        add_one(ctx, out, x)


def is_freed(watch):
    """It is gone, or goes soon: a thread of XLA lets go of a program when it comes to that."""
    deadline = time.monotonic() + 20
    while watch() is not None and time.monotonic() < deadline:
        gc.collect()
    return watch() is None


@pytest.mark.parametrize(("a", "b"), [(0.0, -0.0), (1, True), (1, 1.0)])
def test_equal_is_not_the_same(a, b):
    @dataclasses.dataclass(frozen=True)
    class Fill:
        value: float

        def __call__(self, ctx, out, x):
            out.write(np.full(3, len(repr(self.value)), np.float32))

    assert Fill(a) == Fill(b)
    f, g = callback_like(Fill(a), X), callback_like(Fill(b), X)
    assert f(X)[0] != g(X)[0]
    assert jax.jit(f)(X)[0] != jax.jit(g)(X)[0]


def test_a_callable_whose_hash_or_equality_fails():
    class Odd(Callback):
        def __eq__(self, other):
            raise ValueError("no")

        def __hash__(self):
            raise ValueError("no")

    for f in (callback_like(Odd(), X), jax.jit(callback_like(Odd(), X))):
        np.testing.assert_array_equal(f(X), [1, 1, 1])


def test_two_calls_of_one_function_have_one_handle():
    f = callback_like(add_one, X)
    text = jax.jit(lambda x: (f(x), f(x + 1))).lower(X).as_text()
    keys = {line.split("key = ")[1].split(" ")[0] for line in text.splitlines() if "key = " in line}
    assert len(keys) == 1


def test_programs_have_no_counters_or_addresses():
    """The text is the key of the persistent cache, and has to be the same in the next process."""

    def text():
        def kernel(ctx, out, x):
            add_one(ctx, out, x)

        def step(x):
            return callback_like(kernel, x)(x)

        return jax.jit(step).lower(X).as_text()

    first = text()
    gc.collect()
    assert text() == first


def test_a_module_that_holds_arrays_can_be_the_callback():
    """Such a Module, and its methods, have no hash."""

    class Scale(eqx.Module):
        factor: jax.Array

        def __call__(self, ctx, out, x):
            out.write(np.asarray(x) * np.asarray(self.factor))

        def method(self, ctx, out, x):
            self(ctx, out, x)

    module = Scale(jnp.float32(3.0))
    x = jnp.ones(3)
    for callback in (module, module.method, functools.partial(module.method)):
        np.testing.assert_array_equal(callback_like(callback, x)(x), [3, 3, 3])
        np.testing.assert_array_equal(jax.jit(callback_like(callback, x))(x), [3, 3, 3])
    assert callback_like(module.method, x) is not callback_like(module.method, x)


def use_eager(callback):
    callback_like(callback, X)(X).block_until_ready()


def use_jit(callback):
    jax.jit(callback_like(callback, X))(X).block_until_ready()


def use_aot(callback):
    jax.jit(callback_like(callback, X)).lower(X).compile()(X).block_until_ready()


def use_vmap(callback):
    f = callback_like(callback, X, vmap_method="broadcast_all")
    jax.vmap(f)(jnp.zeros((2, 3))).block_until_ready()


def use_grad(callback):
    f = jax.custom_vjp(callback_like(callback, X))
    f.defvjp(lambda x: (f(x), None), lambda _, cotangent: (callback_like(callback, X)(cotangent),))
    jax.grad(lambda x: f(x).sum())(X).block_until_ready()
    jax.jit(jax.grad(lambda x: f(x).sum()))(X).block_until_ready()


def use_scan(callback):
    f = callback_like(callback, X)
    jax.lax.scan(lambda x, _: (f(x), None), X, length=2)[0].block_until_ready()


def use_error_in_jit(callback):
    def broken(ctx, out, x, callback=callback):
        callback(ctx, out, x)
        raise ValueError("no")

    f = jax.jit(callback_like(broken, X))
    for _ in range(2):
        with pytest.raises(eqxc.KernelError), eqxc.raising():
            f(X).block_until_ready()


def use_checked(callback):
    with eqxc.debug.checked():
        use_twice(callback)


def use_inline(callback):
    with eqxc.debug.inline():
        use_twice(callback)


def use_error(callback):
    def broken(ctx, out, x, callback=callback):
        callback(ctx, out, x)
        raise ValueError("no")

    with pytest.raises(eqxc.KernelError):
        callback_like(broken, X)(X)


def use_trace_only(callback):
    jax.make_jaxpr(callback_like(callback, X))(X)


def use_twice(callback):
    use_jit(callback)
    use_eager(callback)


@pytest.mark.parametrize("use", [use_eager, use_error, use_trace_only, use_inline])
def test_freed_with_its_last_use(use):
    callback = Callback()
    watch = weakref.ref(callback)
    use(callback)
    del callback
    assert is_freed(watch)


@pytest.mark.parametrize(
    "use", [use_jit, use_aot, use_vmap, use_twice, use_grad, use_scan, use_error_in_jit, use_checked]
)
def test_freed_with_its_program(use):
    callback = Callback()
    watch = weakref.ref(callback)
    use(callback)
    del callback
    jax.clear_caches()
    assert is_freed(watch)


def test_freed_though_it_reaches_its_own_function():
    class Owner:
        def __init__(self):
            self.big = np.ones(1000)
            self.function = callback_like(self.kernel, X)

        def kernel(self, ctx, out, x):
            add_one(ctx, out, x)

    owner = Owner()
    owner.function(X)
    jax.jit(owner.function)(X)
    watch = weakref.ref(owner)
    del owner
    jax.clear_caches()
    assert is_freed(watch)


def test_a_failed_call_leaves_no_cycle():
    def run():
        callback = Callback()

        def broken(ctx, out, x, callback=callback):
            raise ValueError("no")

        with contextlib.suppress(eqxc.KernelError):
            callback_like(broken, X)(X)
        return weakref.ref(callback)

    gc.collect()
    gc.disable()
    try:
        assert run()() is None
    finally:
        gc.enable()


def test_kept_by_its_program():
    callback = Callback()
    watch = weakref.ref(callback)
    compiled = jax.jit(callback_like(callback, X)).lower(X).compile()
    del callback
    jax.clear_caches()
    gc.collect()
    assert watch() is not None
    np.testing.assert_array_equal(compiled(X), [1, 1, 1])
    del compiled
    jax.clear_caches()
    assert is_freed(watch)


def test_kept_by_a_pending_result():
    """The last reference to the function goes away while its program runs in another thread."""
    entered, go_on = threading.Event(), threading.Event()

    class Slow(Callback):
        def __call__(self, ctx, out, x):
            entered.set()
            assert go_on.wait(20)
            add_one(ctx, out, x)

    callback = Slow()
    results = []
    functions = [callback_like(callback, X)]
    watch = weakref.ref(callback)
    del callback
    thread = threading.Thread(target=lambda: results.append(functions[0](X)))
    thread.start()
    assert entered.wait(20)
    functions.clear()
    gc.collect()
    assert watch() is not None
    go_on.set()
    thread.join(20)
    np.testing.assert_array_equal(results[0], [1, 1, 1])
    results.clear()
    del thread
    assert is_freed(watch)


@pytest.mark.parametrize("how", ["clear_caches", "delete"])
def test_kept_by_the_pending_result_of_a_program(how):
    """All that could reach the function is gone, caches included, while its program runs."""
    entered, go_on = threading.Event(), threading.Event()

    class Slow(Callback):
        def __call__(self, ctx, out, x):
            entered.set()
            assert go_on.wait(20)
            add_one(ctx, out, x)

    callback = Slow()
    programs = [jax.jit(callback_like(callback, X)).lower(X).compile()]
    watch = weakref.ref(callback)
    del callback
    results = []
    thread = threading.Thread(target=lambda: results.append(programs.pop()(X)))
    thread.start()
    assert entered.wait(20)
    assert programs == []
    if how == "clear_caches":
        jax.clear_caches()
    gc.collect()
    assert watch() is not None
    go_on.set()
    thread.join(20)
    np.testing.assert_array_equal(results[0], [1, 1, 1])
    results.clear()
    del thread
    jax.clear_caches()
    assert is_freed(watch)


def test_keys_are_free_again():
    def make():
        def kernel(ctx, out, x):
            add_one(ctx, out, x)

        return callback_like(kernel, X)

    f = make()
    f(X)
    text = jax.jit(f).lower(X).as_text()
    key = int(text.split("key = ")[1].split(" ")[0])
    assert _ext.Handle.exists(key)
    del f
    jax.clear_caches()
    gc.collect()
    assert not _ext.Handle.exists(key)


def test_no_two_callbacks_share_a_key():
    def make(i):
        return callback_like(lambda ctx, out, x: out.write(np.full(3, i, np.float32)), X)

    programs = [jax.jit(make(i)) for i in range(20)]
    for _ in range(2):
        for i, program in enumerate(programs):
            np.testing.assert_array_equal(program(X), np.full(3, i))
    handle = _ext.Handle(12345, add_one, direct=True)
    with pytest.raises(ValueError, match="the key belongs to another Handle"):
        _ext.Handle(handle.key, add_one, direct=True)


@pytest.mark.parametrize(
    ("attributes", "match"),
    [
        ({"key": np.uint64(99)}, "NOT_FOUND: eqxcallback: no Python callable of this process has the key 99"),
        ({}, "INVALID_ARGUMENT: eqxcallback: expected an attribute `key` of type ui64"),
        ({"key": np.int32(1)}, "INVALID_ARGUMENT: eqxcallback: expected an attribute `key` of type ui64"),
        ({"key": "1"}, "INVALID_ARGUMENT: eqxcallback: expected an attribute `key` of type ui64"),
    ],
)
def test_bad_programs_get_an_error(attributes, match):
    """JAX's own handler crashes the process on an index out of range."""
    call = jax.ffi.ffi_call("eqxcallback_python", like(X))
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=match.split(": ", 1)[1]):
        jax.block_until_ready(jax.jit(lambda x: call(x, **attributes))(X))


@pytest.mark.parametrize("operands", [(), (jnp.zeros(3),), (jnp.zeros(1, jnp.uint32),), (jnp.zeros(2, jnp.int32),)])
def test_bad_eager_programs_get_an_error(operands):
    call = jax.ffi.ffi_call("eqxcallback_python_eager", like(X))
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="expected the key as a first operand"):
        jax.block_until_ready(jax.jit(lambda *xs: call(*xs))(*operands))


def test_own_programs_of_eager_calls_elsewhere(monkeypatch, compilations):
    """On a GPU eager calls cannot read a key from device memory: each callback has a program, which dies with it."""
    monkeypatch.setattr("eqxcallback.xla.calls._eager.platform_of", lambda args: "cuda")
    callback = Callback()
    watch = weakref.ref(callback)
    f = callback_like(callback, X)
    for _ in range(3):
        np.testing.assert_array_equal(f(X), [1, 1, 1])
    assert len(compilations) == 1
    del f, callback
    assert is_freed(watch)


def test_many_calls_do_not_leak():
    import resource

    f = jax.jit(callback_like(add_one, X))
    trees = eqxc.buffer_callback(lambda ctx, out, x: out[0].write(x["a"]), [like(X)])

    def run(n):
        for _ in range(n):
            f(X)
            trees({"a": X})

    run(2000)
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(20_000)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 4096, f"{grown} KiB more after 40,000 calls"
