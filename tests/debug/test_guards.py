"""`debug.checked`: writes beyond an operand or result are found out, and the kernels of this package in C++ are checked."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import _ext
from eqxcallback.debug import _checked


X = jnp.arange(6.0).reshape(2, 3)


def poke(buffer, offset, value=0x5C):
    ctypes.c_uint8.from_address(buffer._address + offset).value ^= value


def run_checked(kernel, *args, result=X, jit=False, **options):
    f = eqxc.buffer_callback(kernel, jax.ShapeDtypeStruct(result.shape, result.dtype), **options)
    with eqxc.debug.checked(), eqxc.raising():
        return jax.block_until_ready((jax.jit(f) if jit else f)(*args))


# -- bands around the buffers of Python kernels


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("which", "offset", "text"),
    [
        ("out", 24, "output 0 .*: 1 bytes after its memory were overwritten, the nearest at 1"),
        ("out", -1, "output 0 .*: 1 bytes before its memory were overwritten, the nearest at 1"),
        ("out", 24 + 1023, "output 0 .*: 1 bytes after its memory were overwritten, the nearest at 1024"),
        ("out", -1024, "output 0 .*: 1 bytes before its memory were overwritten, the nearest at 1024"),
        ("x", 26, "input 0 .*: 1 bytes after its memory were overwritten, the nearest at 3"),
        ("x", -7, "input 0 .*: 1 bytes before its memory were overwritten, the nearest at 7"),
    ],
)
def test_a_write_beyond(which, offset, text, jit):
    def kernel(ctx, out, x):
        out.write(x)
        poke({"out": out, "x": x}[which], offset)

    with pytest.raises(eqxc.KernelError, match=text):
        run_checked(kernel, X, jit=jit)


def test_all_that_is_wrong_is_said():
    def kernel(ctx, out, x):
        np.asarray(out)[0] = 1
        poke(out, -1)
        poke(out, 24)
        poke(x, 0)

    with pytest.raises(eqxc.KernelError) as caught:
        run_checked(kernel, X)
    for text in ("input 0 (", "was changed", "3 of 6 elements", "1 bytes before", "1 bytes after"):
        assert text in str(caught.value.original)


def test_inputs_outside_stay_what_they_were():
    x = X + 0

    def kernel(ctx, out, x):
        out.write(x)
        poke(x, 2)

    with pytest.raises(eqxc.KernelError, match="was changed"):
        run_checked(kernel, x)
    np.testing.assert_array_equal(x, X)


def test_an_output_is_in_the_memory_of_its_input():
    def kernel(ctx, out, x, y):
        assert out._address == x._address != y._address
        assert out._address % 64 == 0
        np.asarray(out)[0] += np.float32(1)

    np.testing.assert_array_equal(run_checked(kernel, X, X, input_output_aliases={0: 0}), [[1, 2, 3], [3, 4, 5]])


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (1,)])
def test_small_shapes(shape):
    x = jnp.ones(shape)
    np.testing.assert_array_equal(run_checked(lambda ctx, out, x: out.write(x), x, result=x), x)


def test_elements_of_less_than_a_byte():
    x = jnp.array([1, -2, 3], jnp.int4)
    y = run_checked(lambda ctx, out, x: out.write(x), x, result=x)
    np.testing.assert_array_equal(y.astype(jnp.int8), [1, -2, 3])


def test_columns_first():
    """The first unwritten element is one of the array, however it lies in memory."""

    class Columns(eqxc.Layer):
        vmap_method = "fold"
        input_layouts = ((1, 0),)
        output_layouts = ((1, 0),)
        complete: bool

        def kernel(self, ctx, out, x):
            assert np.asarray(x).flags.f_contiguous
            if self.complete:
                out.write(x)
            else:
                np.asarray(out)[:, :2] = 1

        def out_type(self, x):
            return x

    with eqxc.debug.checked():
        np.testing.assert_array_equal(Columns(True)(X), X)
        with pytest.raises(eqxc.KernelError, match=r"2 of 6 elements were never written, the first at \(0, 2\)"):
            Columns(False)(X)


def test_a_bool_input_that_is_none():
    two = eqxc.buffer_callback(
        lambda ctx, out: np.asarray(out).view(np.uint8).fill(2), jax.ShapeDtypeStruct((3,), jnp.bool_)
    )()
    with pytest.raises(eqxc.KernelError, match=r"input 0 .* has bytes other than 0 and 1 before the call"):
        run_checked(lambda ctx, out, x: out.write(np.zeros(3, bool)), two, result=two)


# -- kernels in C++


def rms_norm(x):
    return eqxc.ops.rms_norm(x, jnp.ones(x.shape[-1]), implementation="native")


@pytest.fixture
def damage(monkeypatch):
    """A list of functions of a native call's outputs and inputs, which do harm after the kernel."""
    harm = []

    def hook(symbol, run, outputs, inputs):
        def run_and_harm():
            run()
            for function in harm:
                function(outputs, inputs)

        assert symbol == "norm"
        _hook(symbol, run_and_harm, outputs, inputs)

    _hook = _checked._checked_native
    monkeypatch.setattr(_checked, "_checked_native", hook)
    with eqxc.debug.checked():
        yield harm


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (lambda outputs, inputs: poke(outputs[0], 24), "output 0 .*: 1 bytes after its memory"),
        (lambda outputs, inputs: poke(inputs[1], -4), "input 1 .*: 1 bytes before its memory .* at 4"),
        (lambda outputs, inputs: poke(inputs[0], 5), r"input 0 \(Buffer\(shape=\(2, 3\).* was changed"),
    ],
    ids=["band of an output", "band of an input", "input"],
)
def test_what_a_native_kernel_does_wrong(damage, harm, text, jit):
    damage.append(harm)
    with pytest.raises(eqxc.KernelError, match=text) as caught, eqxc.raising():
        jax.block_until_ready((jax.jit(rms_norm) if jit else rms_norm)(X))
    assert caught.value.layer == "norm"
    assert caught.value.operands == "(float32[2,3], float32[3]) -> (float32[2,3])"
    assert "norm failed; native lane" in str(caught.value)


def test_what_a_native_kernel_leaves_unwritten():
    """A kernel that does nothing."""

    def hook(symbol, run, outputs, inputs):
        _checked._checked_native(symbol, lambda: None, outputs, inputs)

    _ext.set_checked_native(hook)
    try:
        with pytest.raises(eqxc.KernelError, match="6 of 6 elements were never written"), eqxc.raising():
            jax.block_until_ready(rms_norm(X))
    finally:
        _ext.set_checked_native(None)


def test_native_kernels_are_right_in_checked_mode():
    plain = rms_norm(X)
    cache, rows, position = jnp.zeros((4, 2)), jnp.ones((1, 2)), jnp.int32(2)
    with eqxc.debug.checked():
        np.testing.assert_array_equal(rms_norm(X), plain)
        np.testing.assert_array_equal(jax.jit(jax.vmap(rms_norm))(X[None])[0], plain)
        appended = eqxc.ops.cache_append(cache, rows, position)  # in place: the result is where the cache is
    np.testing.assert_array_equal(appended, [[0, 0], [0, 0], [1, 1], [0, 0]])


def test_a_native_kernels_own_error_is_not_hidden():
    options = {"eps": np.float64(0), "center": np.bool_(False), "present": np.int64(1)}
    call = jax.ffi.ffi_call("eqxcallback_norm", jax.ShapeDtypeStruct((3, 2), jnp.float32))
    with (
        eqxc.debug.checked(),
        pytest.raises(Exception, match=r"norm\[native\]: expected a result of the type of x"),
    ):
        jax.block_until_ready(jax.jit(lambda x: call(x, **options))(X))


def test_native_kernels_are_checked_no_longer():
    with eqxc.debug.checked():
        rms_norm(X)
    called = []
    _ext.set_checked_native(lambda *args: called.append(args) or args[1]())
    jax.block_until_ready(rms_norm(X))
    _ext.set_checked_native(None)
    assert len(called) == 1
    jax.block_until_ready(rms_norm(X))
    assert len(called) == 1
