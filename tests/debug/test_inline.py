"""`debug.inline`: Python kernels run where they are called."""

import threading
import traceback
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc


X = jnp.arange(6.0).reshape(2, 3)
LIKE_X = jax.ShapeDtypeStruct(X.shape, X.dtype)


class Double(eqxc.Layer):
    """Says where it was called from."""

    seen: ClassVar[list[Any]] = []
    vmap_method = "fold"

    def kernel(self, ctx, out, x):
        self.seen.append((threading.get_ident(), [frame.name for frame in traceback.extract_stack()]))
        np.multiply(x, np.float32(2), out=np.asarray(out))

    def reference(self, x):
        return x * 2

    def backward(self, ctx, grads, args, out, cotangents):
        self.seen.append((threading.get_ident(), [frame.name for frame in traceback.extract_stack()]))
        np.multiply(cotangents, np.float32(2), out=np.asarray(grads[1]))


@pytest.fixture(autouse=True)
def seen():
    Double.seen.clear()
    return Double.seen


def the_caller(f, x):
    return f(x)


def scanned(x):
    return jax.lax.scan(lambda c, _: (Double()(c), None), x, length=2)[0]


USES = {
    "eager": (Double(), lambda x: 2 * x, 1),
    "jit": (jax.jit(lambda x: Double()(x) + 1), lambda x: 2 * x + 1, 1),
    "filter_jit": (eqx.filter_jit(Double()), lambda x: 2 * x, 1),
    "vmap": (jax.jit(jax.vmap(Double())), lambda x: 2 * x, 1),
    "grad": (jax.jit(jax.grad(lambda x: Double()(x).sum())), lambda x: np.full_like(x, 2), 2),
    "scan": (jax.jit(scanned), lambda x: 4 * x, 2),
    "checkpoint": (jax.grad(lambda x: jax.checkpoint(Double())(x).sum()), lambda x: np.full_like(x, 2), None),
}


@pytest.mark.parametrize("name", USES)
def test_kernels_run_where_they_are_called(name, seen):
    f, want, calls = USES[name]
    the_caller(f, X)  # compiled before: it is not used
    seen.clear()
    with eqxc.debug.inline():
        np.testing.assert_array_equal(the_caller(f, X), want(np.asarray(X)))
    assert calls is None or len(seen) == calls
    for thread, names in seen:
        assert thread == threading.get_ident()
        assert "the_caller" in names


class Oops(Exception):
    pass


def broken(ctx, out, x):
    local = 7
    raise Oops(local)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("error", [Oops, KeyboardInterrupt, SystemExit])
def test_the_original_exception_escapes(error, jit):
    def kernel(ctx, out, x):
        local = 7
        raise error(local)

    f = eqxc.buffer_callback(kernel, LIKE_X)
    with pytest.raises(error) as caught, eqxc.debug.inline():
        (jax.jit(f) if jit else f)(X)
    assert type(caught.value) is error
    assert caught.value.__cause__ is None
    innermost = caught.tb
    while innermost.tb_next is not None:
        innermost = innermost.tb_next
    assert innermost.tb_frame.f_locals["local"] == 7  # what a debugger shows


def test_after_it_programs_run_again():
    f = eqxc.buffer_callback(broken, LIKE_X)
    with pytest.raises(Oops), eqxc.debug.inline():
        f(X)
    with pytest.raises(eqxc.KernelError):
        f(X)
    with jax.disable_jit(), pytest.raises(eqxc.KernelError):
        f(X)


def test_other_threads_are_not_inline():
    f, kinds = eqxc.buffer_callback(broken, LIKE_X), []

    def work():
        try:
            f(X)
        except Exception as error:
            kinds.append(type(error))

    with eqxc.debug.inline():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert kinds == [eqxc.KernelError]


def test_trees_and_several_results():
    def kernel(ctx, out, tree, *, scale):
        out["a"].write(np.asarray(tree["x"]) * np.asarray(scale))
        out["b"].write(np.asarray(tree["x"]).sum(1))
        assert (ctx.platform, ctx.stream, ctx.stage) == ("cpu", None, eqxc.ExecutionStage.EXECUTE)

    f = eqxc.buffer_callback(kernel, {"a": LIKE_X, "b": jax.ShapeDtypeStruct((2,), jnp.float32)})
    with eqxc.debug.inline():
        got = f({"x": X}, scale=np.float32(3))
    np.testing.assert_array_equal(got["a"], 3 * X)
    np.testing.assert_array_equal(got["b"], X.sum(1))


def test_in_place():
    x = X + 0

    def kernel(ctx, out, x):
        assert np.shares_memory(out.numpy(), x.numpy())
        assert not x.numpy().flags.writeable
        out.numpy()[0] += np.float32(1)

    with eqxc.debug.inline():
        got = eqxc.buffer_callback(kernel, LIKE_X, input_output_aliases={"x": 0})(x)
    np.testing.assert_array_equal(got, [[1, 2, 3], [3, 4, 5]])
    np.testing.assert_array_equal(x, X)


def test_inputs_are_read_only_and_die_with_the_call():
    kept = []

    def kernel(ctx, out, x):
        kept.append(x)
        out.write(x)
        with pytest.raises(ValueError, match="read-only"):
            np.asarray(x)[...] = 0

    with eqxc.debug.inline():
        eqxc.buffer_callback(kernel, LIKE_X)(X)
    with pytest.raises(RuntimeError, match="Buffer used after its kernel returned"):
        kept[0].numpy()


def test_columns_first():
    class Columns(eqxc.Layer):
        vmap_method = "fold"
        input_layouts = ((1, 0),)
        output_layouts = ((0, 1),)

        def kernel(self, ctx, out, x):
            array = np.asarray(x)
            assert array.flags.f_contiguous
            assert array.shape == (2, 3)
            out.write(array)

        def out_type(self, x):
            return x

    class Rows(Columns):
        input_layouts = ((0, 1),)
        output_layouts = ((1, 0),)

        def kernel(self, ctx, out, x):
            assert out.numpy().flags.f_contiguous
            out.write(x)

    with eqxc.debug.inline():
        np.testing.assert_array_equal(Columns()(X), X)
        np.testing.assert_array_equal(Rows()(X), X)


@pytest.mark.parametrize("dtype", ["bfloat16", "int4", "bool", "float8_e4m3fn", "complex64"])
@pytest.mark.parametrize("shape", [(), (3,), (0, 2)])
def test_dtypes_and_shapes(dtype, shape):
    x = jnp.ones(shape, dtype)
    f = eqxc.buffer_callback(lambda ctx, out, x: out.write(x), jax.ShapeDtypeStruct(shape, x.dtype))
    with eqxc.debug.inline(), eqxc.debug.checked():
        got = f(x)
    assert (got.dtype, got.shape) == (x.dtype, shape)
    np.testing.assert_array_equal(np.asarray(got).astype(complex), np.asarray(x).astype(complex))


def test_declared_64_bits_stay():
    f = eqxc.buffer_callback(
        lambda ctx, out: out.write(np.full(2, 2**40, np.int64)), jax.ShapeDtypeStruct((2,), np.int64)
    )
    with eqxc.debug.inline():
        got = f()
    assert got.dtype == np.int64
    np.testing.assert_array_equal(np.asarray(got), [2**40] * 2)


def test_random_keys():
    key = jax.random.key(3)
    data = jax.ShapeDtypeStruct((2,), jnp.uint32)
    with eqxc.debug.inline():
        got = eqxc.buffer_callback(lambda ctx, out, key: out.write(key), data)(key)
    np.testing.assert_array_equal(got, jax.random.key_data(key))


def test_results_are_where_operands_are():
    f = eqxc.buffer_callback(lambda ctx, out, x: out.write(x), LIKE_X)
    second = jax.devices("cpu")[1]
    with eqxc.debug.inline():
        assert not f(X).committed
        there = f(jax.device_put(X, second))
    assert there.committed
    assert there.devices() == {second}


def test_split_operands_arrive_whole(mesh):
    x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, jax.P("d")))
    with eqxc.debug.inline():
        np.testing.assert_array_equal(Double()(x), 2 * jnp.arange(8.0))
    assert len(Double.seen) == 1


def test_checked_and_inline():
    f = eqxc.buffer_callback(lambda ctx, out, x: None, LIKE_X)
    with (
        pytest.raises(RuntimeError, match="6 of 6 elements were never written"),
        eqxc.debug.checked(),
        eqxc.debug.inline(),
    ):
        f(X)


def test_a_result_is_refused():
    f = eqxc.buffer_callback(lambda ctx, out, x: x, LIKE_X)
    with pytest.raises(ValueError, match="must return None"), eqxc.debug.inline():
        f(X)


def test_debug_nans():
    f = eqxc.buffer_callback(lambda ctx, out, x: out.write(np.full((2, 3), np.nan, np.float32)), LIKE_X)
    with jax.debug_nans(True), eqxc.debug.inline(), pytest.raises(FloatingPointError, match=r"invalid value \(nan\)"):
        f(X)


def test_native_kernels_run_in_programs():
    norm = jax.jit(lambda x: eqxc.ops.rms_norm(x, jnp.ones(3), implementation="native"))
    with eqxc.debug.inline():
        inline = norm(X)
    np.testing.assert_array_equal(inline, norm(X))


def test_a_kernel_may_call_kernels():
    def outer(ctx, out, x):
        out.write(Double()(jnp.array(x)))

    with eqxc.debug.inline():
        np.testing.assert_array_equal(eqxc.buffer_callback(outer, LIKE_X)(X), 2 * X)
    assert "outer" in Double.seen[0][1]


def test_an_order_for_a_buffer_has_all_axes():
    for order in ((0,), (0, 2), (0, 0), (-1, 0)):
        with pytest.raises(ValueError, match="expected order to have each axis of the array once"):
            eqxc.Buffer(np.zeros((2, 3)), order=order)
