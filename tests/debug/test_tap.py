"""`debug.tap`: the identity, which calls a function with what passes."""

import functools
import gc
import logging
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import debug


X = np.arange(3, dtype=np.float32)


@pytest.fixture(params=[False, True], ids=["eager", "jit"])
def run(request):
    """Calls a function of arrays, as it is or compiled."""
    return lambda f, *args: (jax.jit(f) if request.param else f)(*args)


def test_identity(run, seen):
    np.testing.assert_array_equal(run(lambda x: debug.tap(seen, x), jnp.asarray(X)), X)
    (value,) = seen.values()
    assert isinstance(value, np.ndarray)
    np.testing.assert_array_equal(value, X)


@pytest.mark.parametrize("x", [X, 1.0, 2, np.float16(3), np.ones((0, 2), np.int8)], ids=repr)
@pytest.mark.parametrize("name", ["tap", "tap_tangents", "tap_cotangents"])
def test_what_it_returns_is_an_array(run, seen, name, x):
    out = run(lambda: getattr(debug, name)(seen, x))
    assert isinstance(out, jax.Array)
    assert jax.typeof(out) == jax.typeof(x)


def test_what_it_gets_is_its_own(run, seen):
    run(lambda x: debug.tap(seen, x + 1), X)
    run(lambda x: debug.tap(seen, x * 5), X)
    first, second = seen.values()
    assert first.flags.writeable
    np.testing.assert_array_equal(first, X + 1)
    np.testing.assert_array_equal(second, X * 5)


def test_an_unused_result_is_tapped(run, seen):
    assert run(lambda x: (debug.tap(seen, x), 7)[1], X) == 7
    assert len(seen.values()) == 1


def test_equal_taps_stay_two(run, seen):
    run(lambda x: (debug.tap(seen, x), debug.tap(seen, x))[0], X)
    assert len(seen.values()) == 2


def test_trees(run, seen):
    tree = {"b": (X, 2), "a": [None, X[0]]}
    out = run(lambda: debug.tap(seen, tree))
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    (value,) = seen.values()
    assert jax.tree.structure(value) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, value, tree)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(value))


@pytest.mark.parametrize("nothing", [None, (), {}], ids=repr)
def test_nothing(run, seen, nothing):
    assert run(lambda: debug.tap(seen, nothing)) == nothing
    assert seen.values() == [nothing]


def test_numbers_are_what_jax_makes_of_them(run, seen):
    assert debug.tap(seen, 3.5) == 3.5
    run(lambda: debug.tap(seen, (1, 2.5, True, 1j)))
    types = [leaf.dtype.name for leaf in jax.tree.leaves(seen.values()[1])]
    assert types == ["int32", "float32", "bool", "complex64"]
    np.testing.assert_array_equal(run(lambda x: debug.tap(seen, 2) * x, X), 2 * X)  # weakly typed as before


DTYPES = "bool int8 uint16 int32 float16 bfloat16 float32 complex64 float8_e4m3fn float8_e5m2 int4 uint2 float4_e2m1fn"


@pytest.mark.parametrize("dtype", DTYPES.split())
def test_dtypes(seen, dtype):
    x = np.array([0, 1, 1, 0, 1]).astype(getattr(ml_dtypes, dtype, dtype))
    out = jax.jit(lambda x: debug.tap(seen, x))(x)
    assert out.dtype == x.dtype
    (value,) = seen.values()
    assert value.dtype == x.dtype
    np.testing.assert_array_equal(value, x)


def test_x64(x64, seen):
    jax.jit(lambda x: debug.tap(seen, x))(np.float64(1) / 3)
    assert seen.values() == [np.float64(1) / 3]


def test_empty_arrays(run, seen):
    run(lambda x: debug.tap(seen, (x, 1.0)), np.zeros((2, 0), np.float32))
    (value,) = seen.values()
    assert value[0].shape == (2, 0)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_typed_keys(run, seen, impl):
    keys = jax.random.split(jax.random.key(7, impl=impl), 3)
    out = run(lambda k: debug.tap(seen, (k, X)), keys)[0]
    assert out.dtype == keys.dtype
    np.testing.assert_array_equal(jax.random.key_data(out), jax.random.key_data(keys))
    ((value, _),) = seen.values()
    again = jax.random.wrap_key_data(value, impl=value.dtype.metadata["prng_impl"])
    assert again.dtype == keys.dtype
    np.testing.assert_array_equal(value, jax.random.key_data(keys))


def test_result(run, seen):
    assert run(lambda x: debug.tap(seen, x, result=(1, {"a": 2})), X) == (1, {"a": 2})
    np.testing.assert_array_equal(seen.values(), [X])


@pytest.mark.parametrize("place", [0, 2])
def test_with_device(run, seen, place):
    x = jax.device_put(X, jax.devices()[place])
    run(lambda x: debug.tap(seen, x, with_device=True), x)
    ((_, _, device),) = seen.taken()
    assert device == jax.devices()[place]


def test_partial_and_methods(run):
    calls = []

    class Log:
        def method(self, x, transforms):
            calls.append(("method", float(x)))

    def function(x, transforms, *, what):
        calls.append((what, float(x)))

    run(lambda x: debug.tap(Log().method, debug.tap(functools.partial(function, what="partial"), x)), 2.0)
    debug.barrier_wait()
    assert sorted(calls) == [("method", 2.0), ("partial", 2.0)]


def test_no_copy_in_the_program(seen):
    """The value is an operand of the call, and of whoever else reads it."""
    text = jax.jit(lambda x: debug.tap(seen, x * 2) + 1).lower(X).compile().as_text() or ""
    assert "custom-call" in text
    assert "copy" not in text.replace("copy_", "")


def test_the_same_function_is_one_program():
    def function(x, transforms):
        pass

    first, second = (jax.jit(lambda x: debug.tap(function, x)).lower(X) for _ in range(2))
    assert first.as_text() == second.as_text()


def test_a_program_owns_its_function():
    class Function:
        def __call__(self, x, transforms):
            pass

    function = Function()
    gone = weakref.ref(function)
    program = jax.jit(lambda x, f=function: debug.tap(f, x))
    program(X)
    debug.tap(function, X)
    del function
    gc.collect()
    assert gone() is not None
    del program
    jax.clear_caches()
    gc.collect()
    assert gone() is None


def test_a_failing_function(run, caplog, seen):
    def broken(x, transforms):
        raise ValueError(f"no {x}")

    with caplog.at_level(logging.ERROR, logger="eqxcallback"):
        result = run(lambda x: debug.tap(seen, debug.tap(broken, x, ordered=True) + 1, ordered=True), 2.0)
    assert result == 3.0  # the program, and other taps, go on
    assert len([r for r in caplog.records if "broken failed" in r.getMessage()]) == 1
    assert "ValueError: no 2.0" in caplog.text
    with pytest.raises(
        debug.CallbackException, match=r"There were exceptions during callback processing\. Last one was:"
    ) as info:
        debug.barrier_wait()
    (error,) = info.value.exceptions
    assert isinstance(error, ValueError)
    assert str(error) == "no 2.0"
    assert info.value.__cause__ is error
    assert seen.values() == [3.0]  # nothing is raised twice


def test_all_failures_are_raised_together():
    def broken(x, transforms):
        raise (ValueError if x < 2 else KeyError)(int(x))

    jax.jit(lambda x: jax.lax.scan(lambda c, _: (debug.tap(broken, c) + 1, None), x, length=4)[0])(0)
    with pytest.raises(debug.CallbackException) as info:
        debug.barrier_wait()
    values, keys = info.value.split(ValueError)
    assert isinstance(values, debug.CallbackException)  # as `except*` has it
    assert isinstance(keys, debug.CallbackException)
    assert [error.args for error in values.exceptions] == [(0,), (1,)]
    assert [type(error) for error in keys.exceptions] == [KeyError, KeyError]


def test_a_poisoned_kernel_is_raised_as_before():
    class Poisons(eqxc.Layer):
        vmap_method = "fold"
        on_error = "poison"

        def kernel(self, ctx, out, x):
            raise ValueError("bad kernel")

        def out_type(self, x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype)

    def broken(x, transforms):
        raise ValueError("bad tap")

    assert np.isnan(debug.tap(broken, Poisons()(jnp.asarray(X)))).all()
    with pytest.raises(debug.CallbackException, match="bad tap"):
        debug.barrier_wait()
    with pytest.raises(eqxc.KernelError, match="bad kernel"):
        debug.barrier_wait()
    debug.barrier_wait()


def test_a_tap_function_may_not_wait_for_itself():
    debug.tap(lambda x, _: debug.barrier_wait("inner"), X)
    with pytest.raises(debug.CallbackException, match=r"barrier_wait\(inner\): called by a tap function"):
        debug.barrier_wait()


def test_a_tap_function_may_run_jax(run, seen):
    run(lambda x: debug.tap(lambda x, _: debug.tap(seen, jnp.sin(x)), x), X)
    np.testing.assert_allclose(seen.values()[0], np.sin(X), rtol=1e-6)


def test_keyboard_interrupt_stops_the_program():
    def interrupt(x, transforms):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        debug.tap(interrupt, X)
    with pytest.raises(KeyboardInterrupt), eqxc.raising():
        jax.block_until_ready(jax.jit(lambda x: debug.tap(interrupt, x))(X))
    debug.barrier_wait()


FLOAT0 = np.zeros(2, jax.dtypes.float0)
BAD_LEAVES = {
    "text": ({"a": "text"}, r"expected x\['a'\] to be an array or a number; got 'text' of type str"),
    "function": ((X, print), r"expected x\[1\] to be .*; got <built-in function print> of type"),
    "float0": ([FLOAT0], r"expected x\[0\] to be .*; got ndarray of dtype .*float0.*for tangents of integers"),
    "object": (np.array([None]), r"expected x to be .*; got ndarray of dtype object"),
}


@pytest.mark.parametrize("name", BAD_LEAVES)
def test_leaves_that_are_no_arrays(run, seen, name):
    x, message = BAD_LEAVES[name]
    with pytest.raises(TypeError, match=f"eqxcallback.debug.tap: {message}"):
        run(lambda: debug.tap(seen, x))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"mode": "later"}, ValueError, 'expected mode to be "sync" or "async"; got \'later\''),
        ({"ordered": 1}, TypeError, "expected ordered to be True or False; got 1 of type int"),
        ({"with_device": None}, TypeError, "expected with_device to be True or False; got None"),
        ({"device_index": -1}, ValueError, "expected device_index to be None or the number of a device .*; got -1"),
        ({"device_index": True}, ValueError, "expected device_index to be None or .*; got True"),
        ({"device_index": 1}, ValueError, "expected device_index to be one of the 1 devices of the program; got 1"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else None,
)
def test_wrong_options(run, seen, options, kind, message):
    with pytest.raises(kind, match=message):
        run(lambda x: debug.tap(seen, x, **options), X)


@pytest.mark.parametrize("name", ["tap", "tap_tangents", "tap_cotangents"])
def test_what_is_no_function(name):
    with pytest.raises(TypeError, match=rf"debug\.{name}: expected a function fn\(x, transforms\); got 3"):
        getattr(debug, name)(3, X)


@pytest.mark.parametrize("ordered", [False, True])
def test_lowering_for_cuda(ordered):
    def f(x):
        return debug.tap(lambda x, _, device: None, x, ordered=ordered, with_device=True)

    def loss(x):
        return jax.lax.scan(lambda c, _: (jax.vmap(jax.checkpoint(f))(c) ** 2, None), x, length=2)[0].sum()

    text = jax.jit(jax.grad(loss)).trace(X).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @eqxcallback_python(" in text
    assert "has_side_effect = true" in text
    assert ("!stablehlo.token" in text) == ordered
    both = jax.jit(f).trace(X).lower(lowering_platforms=("cpu", "cuda")).as_text()
    assert both.count("custom_call @eqxcallback_python(") == 2
    with pytest.raises(ValueError, match="cannot be lowered for tpu"):
        jax.jit(f).trace(X).lower(lowering_platforms=("tpu",))


def test_what_cannot_be_called_with_a_value():
    async def later(x, transforms):
        pass

    def lazy(x, transforms):
        yield x

    for fn, got in (
        (lambda x: None, r".*, of the signature \(x\) \(too many positional arguments\)"),
        (lambda x, t, y: None, r".*, of the signature \(x, t, y\) \(missing a required argument: 'y'\)"),
        (later, "a coroutine function, of which a call runs nothing"),
        (functools.partial(lazy), "a generator function"),
    ):
        with pytest.raises(TypeError, match=rf"debug\.tap.*: expected a function fn\(x, transforms\); got {got}"):
            debug.tap(fn, X)
    match = r"debug\.tap: expected a function fn\(x, transforms, device=device\); got .*, of the signature \(x, t\)"
    with pytest.raises(TypeError, match=match):
        debug.tap(lambda x, t: None, X, with_device=True)
