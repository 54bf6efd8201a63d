"""The first call of a Python kernel on given types raises if elements of an output were left unwritten."""

import itertools
import re
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import _ext

from ..layers import Scale
from .fake_gpu import F32, OK, run_on_fake_gpu
from .kernels import callback_like


X = jnp.arange(6.0).reshape(2, 3)
NAMES = [
    *(
        "bool",
        "int4",
        "uint2",
        "float4_e2m1fn",
        "int8",
        "uint8",
        "float8_e4m3fn",
        "int16",
        "uint16",
        "float16",
        "bfloat16",
    ),
    *("int32", "uint32", "float32", "int64", "uint64", "float64", "complex64", "complex128"),
]
# Those of which one element is enough.
SURE = [name for name in NAMES if name in ("bool", "int4", "uint2", "float4_e2m1fn") or name[-2:] in ("32", "64", "28")]


keys = itertools.count(2**61)


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def left(kernel, shape, name, *, aliased=False):
    """Return how `kernel(array)` is refused, or `""`, in a call of its own."""
    array = np.zeros(shape, dtype_of(name))
    handle = _ext.Handle(next(keys), lambda ctx, out, *inputs: kernel(out.numpy()), direct=True)
    inputs = (_ext.Buffer(array, writeable=False),) if aliased else ()
    try:
        handle.run(_ext.ExecutionContext(), (_ext.Buffer(array),), inputs)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("jit", [False, True])
def test_a_name_that_is_bound_again(jit):
    def rebinds(ctx, out, x):
        out = np.asarray(x) * 2  # noqa: F841

    f = callback_like(rebinds, X)
    with pytest.raises(eqxc.KernelError) as caught, eqxc.raising():
        jax.block_until_ready((jax.jit(f) if jit else f)(X))
    assert str(caught.value.original) == (
        f"{rebinds.__qualname__}: output 0, float32[2,3]: 6 of 6 elements were never written, the first at (0, 0). Results are "
        "what a kernel writes into `out`: `out[...] = value` writes, and `out = value` only gives the name to something else. "
        "Write every element, in every call."
    )


def test_a_layer():
    class Rebinds(Scale):
        def kernel(self, ctx, out, x):
            out = np.asarray(x) * self.weight  # noqa: F841

    for call in (Rebinds(jnp.ones(3)), jax.jit(lambda x: Rebinds(jnp.ones(3))(x))):
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=r"Rebinds: output 0, .*3 of 3 elements were never written"
        ):
            jax.block_until_ready(call(jnp.ones(3)))


@pytest.mark.parametrize("name", NAMES)
def test_all_of_it(name):
    assert "5 of 5 elements were never written" in left(lambda out: None, (5,), name)


@pytest.mark.parametrize("name", SURE)
def test_one_element(name):
    def kernel(out):
        written = np.ones(out.shape, bool)
        written[17, 3] = False
        out[written] = np.ones((), out.dtype)

    assert "1 of 300 elements were never written, the first at (17, 3)" in left(kernel, (30, 10), name)
    assert "1 of 1 elements" in left(lambda out: None, (), name)


@pytest.mark.parametrize("name", NAMES)
def test_a_part(name):
    def kernel(out):
        out[:250] = np.ones((), out.dtype)

    text = left(kernel, (300,), name)
    if name in SURE:
        assert "50 of 300 elements were never written, the first at (250,)" in text
    else:  # elements that were filled with a one by chance look alike
        assert int(re.findall(r"(\d+) of 300", text)[0]) >= 50


@pytest.mark.parametrize("name", ["int8", "uint8", "float8_e4m3fn", "int16", "float16", "bfloat16"])
def test_every_value_may_be_written(name):
    """Also those that an output was filled with."""
    bits = np.arange(2 ** (8 * dtype_of(name).itemsize)).astype(f"uint{8 * dtype_of(name).itemsize}")
    for _ in range(20):
        assert left(lambda out: np.copyto(out.view(bits.dtype), bits), bits.shape, name) == ""
    for value in bits[:256]:
        assert left(lambda out: out.view(bits.dtype).fill(value), (), name) == ""  # noqa: B023


@pytest.mark.parametrize("name", ["int8", "int16", "int32", "float32", "float64", "complex64"])
def test_random_bits_may_be_written(name):
    random = np.random.default_rng(0)
    for _ in range(20):
        assert (
            left(
                lambda out: np.copyto(out.view(np.uint8), random.integers(0, 256, out.nbytes, np.uint8)), (5000,), name
            )
            == ""
        )


def test_nan_may_be_written():
    for name in ("float16", "bfloat16", "float32", "float64"):
        for sign in (1, -1):
            assert left(lambda out: out.fill(sign * np.nan), (100_000,), name) == ""  # noqa: B023


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8, jnp.bool_])
def test_a_kernel_runs_once(dtype):
    calls = []

    def kernel(ctx, out):
        calls.append(0)
        out.write(np.arange(5000).astype(np.int8).astype(out.dtype))

    eqxc.buffer_callback(kernel, jax.ShapeDtypeStruct((5000,), dtype), has_side_effect=True)()
    assert len(calls) == 1


def test_each_type_once():
    def kernel(ctx, out, x):
        if wanted:
            out.write(x)

    f, wanted = callback_like(kernel, X), True
    np.testing.assert_array_equal(f(X), X)
    wanted = False
    f(X)  # nobody looks again
    jax.jit(f)(X).block_until_ready()
    g = eqxc.buffer_callback(kernel, jax.ShapeDtypeStruct((4,), jnp.float32))  # the same handle
    with pytest.raises(eqxc.KernelError, match="4 of 4 elements"):
        g(jnp.ones(4))
    f(X)
    with pytest.raises(eqxc.KernelError, match="4 of 4 elements"):
        g(jnp.ones(4))  # what failed is looked at again
    wanted = True
    g(jnp.ones(4))
    wanted = False
    g(jnp.ones(4))


def test_under_vmap():
    def first_row(ctx, out, x):
        np.atleast_2d(np.asarray(out))[0] = np.atleast_2d(np.asarray(x))[0]

    f = eqxc.buffer_callback(first_row, jax.ShapeDtypeStruct((3,), jnp.float32), vmap_method="broadcast_all")
    np.testing.assert_array_equal(f(X[0]), X[0])
    with pytest.raises(eqxc.KernelError, match=r"3 of 6 elements were never written, the first at \(1, 0\)"):
        jax.vmap(f)(X)


def test_a_kernel_that_raises_is_looked_at_later():
    errors = [ValueError("mine"), None]

    def kernel(ctx, out, x):
        if (error := errors.pop(0)) is not None:
            raise error

    f = callback_like(kernel, X)
    with pytest.raises(eqxc.KernelError, match="ValueError: mine"):
        f(X)
    with pytest.raises(eqxc.KernelError, match="never written"):
        f(X)


def test_what_overwrites_an_input_keeps_it():
    def kernel(ctx, out, x):
        np.asarray(out)[0] += np.float32(1)

    f = callback_like(kernel, X, input_output_aliases={0: 0})
    for call in (f, jax.jit(f)):
        np.testing.assert_array_equal(call(X), X.at[0].add(1))
    assert left(lambda out: None, (5,), "float32", aliased=True) == ""


def test_several_outputs():
    def kernel(ctx, out):
        out["b"].write(np.ones(2, np.float32))

    types = {
        name: jax.ShapeDtypeStruct((size,), jnp.float32) for name, size in (("a", 0), ("b", 2), ("c", 4), ("d", 1))
    }
    with pytest.raises(eqxc.KernelError, match=r"output 2, float32\[4\]: 4 of 4 .*; output 3, float32\[1\]: 1 of 1 "):
        eqxc.buffer_callback(kernel, types)()


def test_nothing_to_write():
    for types in ((), jax.ShapeDtypeStruct((0, 3), jnp.float32)):
        eqxc.buffer_callback(lambda ctx, out, x: None, types, has_side_effect=True)(X)
    jax.effects_barrier()


def test_column_major():
    class Gemm(eqxc.Layer):
        output_layouts = ((1, 0),)

        def kernel(self, ctx, out, x):
            np.asarray(out)[0] = 0

        def reference(self, x):
            return x

    with pytest.raises(eqxc.KernelError, match=r"3 of 6 elements were never written, the first at \(1, 0\)"):
        Gemm()(X)


def test_gradients():
    class Forgets(Scale):
        def backward(self, ctx, grads, args, out, cotangents):
            if grads[1] is not None:
                grads[1].write(np.asarray(cotangents) * np.asarray(self.weight))

    layer, x = Forgets(jnp.ones(3)), jnp.ones(3)
    jax.grad(lambda x: layer(x).sum())(x)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"Forgets\.backward: grads\[\d\].*, float32\[3\]: 3 of 3 elements"
    ):
        jax.grad(lambda layer: layer(x).sum())(layer)


def test_poison():
    class Poisons(eqxc.Layer):
        on_error = "poison"

        def kernel(self, ctx, out, x):
            np.asarray(out[1])[...] = np.asarray(x)

        def reference(self, x):
            return x, x

    for _ in range(2):
        outs = []
        with pytest.raises(eqxc.KernelError, match=r"output 0, .*6 of 6 elements were never written"), eqxc.raising():
            outs += jax.block_until_ready(jax.jit(lambda x: Poisons()(x))(X))
        assert [np.isnan(out).all() for out in outs] == [True, True]


def test_inline():
    with eqxc.debug.inline(), pytest.raises(RuntimeError, match=r"<lambda>: output 0, .*6 of 6 elements"):
        callback_like(lambda ctx, out, x: None, X)(X)


def test_two_first_calls_at_the_same_time():
    barrier = threading.Barrier(2, timeout=60)

    def kernel(ctx, out, x):
        barrier.wait()
        out.write(x)

    f, results = callback_like(kernel, X), []
    threads = [threading.Thread(target=lambda: results.append(f(X))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [np.array_equal(result, X) for result in results] == [True, True]


def test_not_on_a_gpu(fake_xla):
    """A comparison would wait for the device. The memory is the host's here, and holds zeros."""
    code, _, out = run_on_fake_gpu(fake_xla, lambda ctx, out, x: None, np.ones(3, np.float32), F32)
    assert code == OK
    assert not out.any()


def test_a_call_in_place_proves_nothing_of_others():
    """There the output holds the operand, so that nobody can see what the kernel leaves."""

    def kernel(ctx, out, x):
        out[0] = np.float32(7)

    def called(**aliases):
        like = jax.ShapeDtypeStruct((4,), jnp.float32)
        return jax.jit(lambda x: eqxc.buffer_callback(kernel, like, **aliases)(x))

    x = jnp.arange(4.0)
    np.testing.assert_array_equal(called(input_output_aliases={0: 0})(x), [7, 1, 2, 3])
    plain = called()
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match="3 of 4 elements were never written"):
            jax.block_until_ready(plain(x))
