"""`KernelHandle`: what a program refers to, and how long it lives."""

import copy
import functools
import gc
import pickle
import subprocess
import sys
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import xla

from .kernels import add_one, callback_like
from .test_handles import Callback, is_freed


X = jnp.zeros(3)


def handle_of(function, *args) -> Any:
    (call,) = eqxc.inspect(function, *args).calls
    return call.handle


def test_a_handle_is_a_name():
    handle = handle_of(callback_like(add_one, X), X)
    assert (handle.kind, handle.name) == ("python", "add_one")
    assert len(handle.content_hash) == 16
    assert int(handle.content_hash, 16) < 2**63
    assert repr(handle) == f"KernelHandle(kind='python', name='add_one', content_hash='{handle.content_hash}')"
    with pytest.raises(AttributeError):
        handle.name = "another"
    assert not callable(handle)
    for twin in (pickle.loads(pickle.dumps(handle)), copy.deepcopy(handle)):
        assert twin == handle
        assert hash(twin) == hash(handle)


def test_it_is_what_the_text_of_the_program_has():
    f = callback_like(add_one, X)
    key = int(jax.jit(f).lower(X).as_text().split("key = ")[1].split(" ")[0])
    assert handle_of(f, X).content_hash == f"{key:016x}"


def test_equal_kernels_have_equal_handles():
    def make(amount):
        def kernel(ctx, out, x):
            out.write(np.asarray(x) + np.float32(amount))

        return callback_like(kernel, X)

    f, g = make(1), make(2)
    programs = jax.jit(f).lower(X), jax.jit(g).lower(X)  # of one name, and alive together
    assert handle_of(f, X) == handle_of(jax.jit(f), X)
    assert handle_of(f, X) != handle_of(g, X)
    assert len({handle_of(h, X) for h in (f, g, f)}) == 2
    assert handle_of(f, X) != handle_of(callback_like(add_one, X), X)
    del programs


def test_the_next_process_has_the_same():
    code = (
        "import jax, jax.numpy as jnp, eqxcallback as eqxc\n"
        "from tests.callback.kernels import add_one\n"
        "f = eqxc.buffer_callback(add_one, jax.ShapeDtypeStruct((3,), jnp.float32))\n"
        "print(eqxc.inspect(f, jnp.zeros(3)).calls[0].handle)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == repr(handle_of(callback_like(add_one, X), X))


def test_it_keeps_nothing_alive():
    callback = Callback()
    watch = weakref.ref(callback)
    handle = handle_of(callback_like(callback, X), X)
    del callback
    jax.clear_caches()
    assert is_freed(watch)
    assert handle.name == "Callback"


def test_it_lives_as_long_as_programs():
    callback = Callback()
    f = callback_like(callback, X)
    compiled = jax.jit(f).lower(X).compile()
    watch = weakref.ref(handle_of(f, X))
    del f, callback
    jax.clear_caches()
    gc.collect()
    assert watch() is not None
    np.testing.assert_array_equal(compiled(X), [1, 1, 1])
    del compiled
    assert is_freed(watch)


def test_it_lives_as_long_as_its_function():
    """Without any program."""
    f = callback_like(Callback(), X)
    f(X)
    watch = weakref.ref(handle_of(f, X))
    jax.clear_caches()
    gc.collect()
    assert watch() is not None
    del f
    assert is_freed(watch)


def test_the_kernels_of_a_layer_have_their_own():
    class Double(eqxc.Layer):
        vmap_method = "fold"

        def kernel(self, ctx, out, x):
            out.write(np.asarray(x) * 2)

        def reference(self, x):
            return x * 2

        def backward(self, ctx, grads, args, out, cotangents):
            grads[1].write(np.asarray(cotangents) * 2)

    layer = Double()
    forward, backward = eqxc.inspect(jax.grad(lambda x: (layer(x) ** 2).sum()), X).calls
    assert forward.handle is not None
    assert backward.handle is not None
    assert (forward.handle.name, backward.handle.name) == (Double.__qualname__,) * 2
    assert forward.handle != backward.handle
    assert forward.handle == handle_of(layer, X)


def test_kernels_in_cpp():
    x = jnp.ones((2, 4))
    norm = handle_of(lambda x: eqxc.ops.rms_norm(x, implementation="native"), x)
    assert (norm.kind, norm.name) == ("native", "rms_norm")
    assert norm == handle_of(lambda x: eqxc.ops.rms_norm(x, eps=1e-3, implementation="native"), x[0])
    assert norm != handle_of(lambda x: eqxc.ops.layer_norm(x, implementation="native"), x)


@pytest.mark.wrong_types  # a lowering that nothing lowers
def test_the_content_of_others():
    """A user's library has its hash in its target; code for a GPU is described by all it is made of."""
    first, second = (xla.kernel_handle(xla.LaunchLowering(target, {}), "op") for target in ("f_1", "f_2"))
    assert (first.kind, first.name) == ("native", "op")
    assert first != second
    never: Any = None
    one, same, other = (
        xla.kernel_handle(xla.TypedLowering(never, "launch", lambda text=text: text), "op") for text in "aab"
    )
    assert one.kind == "device"
    assert one == same != other


def test_rows_without_a_kernel_have_none():
    def jax_own(x):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((3,), jnp.float32), x)

    assert handle_of(jax_own, X) is None
    norm = functools.partial(eqxc.ops.rms_norm, implementation="native")
    forward, tangent = eqxc.inspect(lambda x: jax.jvp(norm, (x,), (x,)), jnp.ones((2, 4))).calls
    assert forward.handle is not None
    assert (tangent.lane, tangent.handle) == ("reference", None)
