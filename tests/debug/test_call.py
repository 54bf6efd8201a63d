"""`debug.call`: a function on the host, with results."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import debug


X = np.arange(24, dtype=np.int32).reshape(2, 3, 4)


@pytest.fixture(params=[False, True], ids=["eager", "jit"])
def run(request):
    return lambda f, *args: (jax.jit(f) if request.param else f)(*args)


def test_an_array(run):
    double = lambda x: 2 * x
    f = lambda x: 3 * (1 + debug.call(double, x + 1, result_shape=x))
    np.testing.assert_array_equal(run(f, X), 3 * (1 + 2 * (X + 1)))


def test_trees(run):
    def swap(x):
        assert isinstance(x["a"], np.ndarray)
        return x["b"], [x["a"]]

    a, b = np.float32(1), np.ones(3, np.int8)
    out = run(lambda a, b: debug.call(swap, {"a": a, "b": b, "n": None}, result_shape=(b, [a])), a, b)
    assert jax.tree.structure(out) == jax.tree.structure((b, [a]))
    jax.tree.map(np.testing.assert_array_equal, out, (b, [a]))
    assert out[0].dtype == np.int8


@pytest.mark.parametrize(
    ("result_shape", "returned", "dtype"),
    [
        (1.0, 2.5, "float32"),
        (1, np.int32(3), "int32"),
        (True, np.bool_(True), "bool"),
        (np.float64(0), np.float64(7), "float32"),
        (jax.ShapeDtypeStruct((2,), "bfloat16"), jnp.ones(2, jnp.bfloat16), "bfloat16"),
        (jax.ShapeDtypeStruct((2, 0), "float32"), np.ones((2, 0)), "float32"),
        (np.zeros(3, np.complex64), np.ones(3) * 1j, "complex64"),
    ],
    ids=str,
)
def test_result_shapes(run, result_shape, returned, dtype):
    out = run(lambda: debug.call(lambda x: returned, 0, result_shape=result_shape))
    assert out.dtype.name == dtype
    np.testing.assert_array_equal(np.asarray(out, np.complex64), np.asarray(returned, np.complex64))


@pytest.mark.parametrize("nothing", [(), None, {}], ids=repr)
def test_no_results(run, nothing):
    calls = []

    def note(x):
        calls.append(x.tolist())
        return nothing

    assert run(lambda: debug.call(note, np.arange(2), result_shape=nothing)) == nothing
    debug.barrier_wait()
    assert calls == [[0, 1]]


def test_an_unused_result(run):
    calls = []
    run(lambda x: (debug.call(lambda x: calls.append(1) or x, x, result_shape=x), x)[1], X)
    debug.barrier_wait()
    assert calls == [1]


def test_x64(x64):
    assert debug.call(lambda x: x / 3, np.float64(1), result_shape=np.float64(0)) == np.float64(1) / 3
    with pytest.raises(eqxc.KernelError, match=r"float32\[\] at result but returned float64\[\]"):
        debug.call(lambda x: x, np.float64(1), result_shape=np.float32(0))


def test_with_device(run):
    def where(x, *, device):
        return np.int32(device.id)

    x = jax.device_put(1.0, jax.devices()[2])
    assert run(lambda x: debug.call(where, x, result_shape=0, with_device=True), x) == 2


def test_typed_keys():
    def bits(k):
        return k.astype(np.uint32)

    key = jax.random.key(3)
    words = jax.random.key_data(key)
    np.testing.assert_array_equal(debug.call(bits, key, result_shape=words), words)


WRONG = {
    "tree": (
        lambda x: (x, x),
        0.0,
        r"should have returned a result with pytree PyTreeDef\(\*\) but returned .*\(\*, \*\)",
    ),
    "shape": (
        lambda x: {"a": np.ones(3)},
        {"a": 0.0},
        r"with abstract values float32\[\] at result\['a'\] but returned float32\[3\]",
    ),
    "dtype": (lambda x: [np.int8(0)], [0.0], r"with abstract values float32\[\] at result\[0\] but returned int8\[\]"),
    "none": (
        lambda x: None,
        0.0,
        r"should have returned a result with pytree PyTreeDef\(\*\) but returned PyTreeDef\(None\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_results(name):
    fn, result_shape, message = WRONG[name]
    with pytest.raises(eqxc.KernelError, match=message) as info:
        debug.call(fn, 1.0, result_shape=result_shape)
    assert isinstance(info.value.original, TypeError)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(jax.jit(lambda: debug.call(fn, 1.0, result_shape=result_shape))())


@pytest.mark.parametrize("value", [2**40, np.int64(-(2**31) - 1), np.array([1, 2**32])], ids=str)
def test_integers_that_32_bits_do_not_hold(value):
    shape = jax.ShapeDtypeStruct(np.shape(value), jnp.int32)
    with pytest.raises(eqxc.KernelError, match=r"OverflowError: Callback func .* returned .* int32 does not hold"):
        debug.call(lambda x: value, 1.0, result_shape=shape)


def test_a_failing_function():
    def broken(x):
        raise ValueError("user exception")

    with pytest.raises(eqxc.KernelError, match="broken") as info:
        debug.call(broken, 1.0, result_shape=1.0)
    assert isinstance(info.value.__cause__, ValueError)


@pytest.mark.parametrize(
    "leaf", ["text", print, jax.ShapeDtypeStruct((), jax.random.key(0).dtype)], ids=["text", "fn", "key"]
)
def test_bad_result_shapes(leaf):
    match = r"either numeric scalars, or must have 'shape' and 'dtype' attributes. Got .* at result_shape\[1\]"
    with pytest.raises(ValueError, match=match):
        debug.call(lambda x: x, 1.0, result_shape=(1.0, leaf))


def test_bad_arguments():
    wrong: Any = 3
    with pytest.raises(TypeError, match=r"debug\.call: expected a function fn\(x\); got 3"):
        debug.call(wrong, 1.0, result_shape=1.0)
    with pytest.raises(TypeError, match=r"debug\.call: expected a function fn\(x\); got .*, of the signature \(\)"):
        debug.call(lambda: 1.0, 1.0, result_shape=1.0)
    with pytest.raises(TypeError, match=r"debug\.call: expected ordered to be True or False; got 3 of type int"):
        debug.call(lambda x: x, 1.0, result_shape=1.0, ordered=wrong)
    with pytest.raises(TypeError, match=r"debug\.call: expected x\[1\] to be an array or a number; got 'a'"):
        debug.call(lambda x: x, (1, "a"), result_shape=1.0)


def test_what_has_no_rule():
    f = lambda x: debug.call(np.sin, x, result_shape=x)
    with pytest.raises(NotImplementedError, match="batching rules are implemented only for id_tap, not for call"):
        jax.vmap(f)(jnp.ones(3))
    with pytest.raises(NotImplementedError, match="JVP rule is implemented only for id_tap, not for call"):
        jax.grad(f)(1.0)


def test_control_flow():
    def times(args):
        return args[0] * args[1]

    def body(i, acc):
        return jax.lax.cond(i % 2 == 1, lambda: debug.call(times, (acc, i), result_shape=acc), lambda: acc)

    loop = jax.jit(lambda x: jax.lax.fori_loop(0, 6, body, x))
    assert loop(2) == 2 * 1 * 3 * 5
    positive = lambda x: debug.call(lambda x: np.bool_(x < 3), x, result_shape=True)
    assert jax.jit(lambda x: jax.lax.while_loop(positive, lambda x: x + 1, x))(0) == 3


# Another framework's autodiff, for which a small one stands: `value` and `pullback`, on NumPy arrays.


def value(x):
    return np.sin(x) * x


def pullback(x, g):
    return g * (np.cos(x) * x + np.sin(x))


def pullback2(x, g):
    return g * (2 * np.cos(x) - np.sin(x) * x)


def differentiable(*functions):
    """`functions[0]` on the host, of which the others are the derivatives, in order: gradients of gradients are calls too."""
    first, *rest = functions

    @jax.custom_jvp
    def f(x):
        return debug.call(lambda x: first(x).astype(x.dtype), x, result_shape=x)

    @f.defjvp
    def rule(primals, tangents):
        (x,), (t,) = primals, tangents
        return f(x), differentiable(*rest)(x) * t

    return f


def test_another_framework_in_reverse_mode():
    @jax.custom_vjp
    def f(x):
        return debug.call(value, x, result_shape=x)

    def backward(x, g):
        return (debug.call(lambda args: pullback(*args), (x, g), result_shape=x),)

    f.defvjp(lambda x: (f(x), x), backward)
    x = jnp.float32(0.7)
    np.testing.assert_allclose(jax.jit(jax.grad(f))(x), jax.grad(lambda x: jnp.sin(x) * x)(x), rtol=1e-6)


def test_another_framework_in_any_order_and_both_modes():
    one = np.float32(1)
    f = differentiable(value, functools.partial(pullback, g=one), functools.partial(pullback2, g=one))
    like = lambda x: jnp.sin(x) * x
    x = jnp.float32(0.7)
    for transform in (jax.grad, jax.jacfwd, lambda f: jax.grad(jax.grad(f)), lambda f: jax.jacfwd(jax.grad(f))):
        np.testing.assert_allclose(jax.jit(transform(f))(x), transform(like)(x), rtol=1e-5)


def test_torch():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    def torch_value(x):
        return (torch.from_numpy(x).sin() * torch.from_numpy(x)).numpy()

    def torch_pullback(args):
        x, g = map(torch.from_numpy, args)
        x.requires_grad_()
        return torch.autograd.grad(x.sin() * x, x, g)[0].numpy()

    @jax.custom_vjp
    def f(x):
        return debug.call(torch_value, x, result_shape=x)

    f.defvjp(lambda x: (f(x), x), lambda x, g: (debug.call(torch_pullback, (x, g), result_shape=x),))
    x = jnp.arange(3.0)
    wanted = jax.grad(lambda x: (jnp.sin(x) * x).sum())(x)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: f(x).sum()))(x), wanted, rtol=1e-5)


def test_jax_on_another_device():
    """With reverse mode, in both orders."""
    other = jax.devices()[1]

    def elsewhere(function, arg):
        def host(arg):
            return jax.jit(function)(jax.device_put(arg, other))

        @jax.custom_vjp
        def f(arg):
            return debug.call(host, arg, result_shape=jax.eval_shape(function, arg))

        f.defvjp(
            lambda arg: (f(arg), arg),
            lambda arg, g: (elsewhere(lambda pair: jax.vjp(function, pair[0])[1](pair[1])[0], (arg, g)),),
        )
        return f(arg)

    f = lambda x: 2.0 * elsewhere(lambda x: x * x * x, x)
    assert f(5.0) == 250
    assert jax.grad(f)(5.0) == 150
    assert jax.jit(jax.grad(jax.grad(f)))(5.0) == 60


def test_several_devices(mesh):
    """Each one calls with all of it; inside `shard_map` with its part."""
    shapes = []

    def host(x):
        shapes.append(x.shape)
        return x + 1

    x = jax.device_put(np.arange(8.0, dtype=np.float32), jax.NamedSharding(mesh, jax.P("d")))
    f = lambda x: debug.call(host, x, result_shape=x)
    np.testing.assert_array_equal(jax.jit(f)(x), np.arange(8) + 1)
    assert shapes == [(8,)] * 4
    shapes.clear()
    over = jax.shard_map(f, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))
    np.testing.assert_array_equal(jax.jit(over)(x), np.arange(8) + 1)
    assert shapes == [(2,)] * 4


def test_lowering_for_cuda():
    f = lambda x: debug.call(np.sin, x, result_shape=x)
    text = jax.jit(f).trace(1.0).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @eqxcallback_python(" in text


def doubled(x):
    return 2 * x


def test_export_for_many_sizes():
    like = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 2"), jnp.float32)
    exported = eqxc.export(jax.jit(lambda x: debug.call(doubled, x, result_shape=x)))(like)
    loaded = jax.export.deserialize(exported.serialize())
    for size in (3, 5):
        np.testing.assert_array_equal(loaded.call(jnp.ones((size, 2))), np.full((size, 2), 2))
