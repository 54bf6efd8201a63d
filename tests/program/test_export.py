"""`export`: statics are those of `filter_jit`, sizes may be symbols, and other processes need no classes."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc


KEY = jax.random.key(0)
X = jnp.arange(32.0).reshape(2, 16) / 32
TYPE = jax.ShapeDtypeStruct(X.shape, X.dtype)


def reloaded(program):
    """As another process has it, which knows JAX alone."""
    return jax.export.deserialize(bytearray(program.serialize()))


class Net(eqx.Module):
    layers: list[Any]
    scale: float
    activation: Any
    name: str = eqx.field(static=True)

    def __init__(self, scale=2.0, name="net", activation=jax.nn.relu):
        self.layers = [eqxc.nn.Linear(16, 16, key=KEY), eqxc.nn.RMSNorm(16)]
        self.scale, self.activation, self.name = scale, activation, name

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.activation(x) * self.scale


def apply(model, x):
    return jax.vmap(model)(x)


def test_a_model_is_an_argument():
    model = eqxc.nn.MultiheadAttention(2, 16, key=KEY)
    attend = lambda model, x: model(x, x, x)
    program = eqxc.export(attend)(model, TYPE)
    assert isinstance(program, jax.export.Exported)
    assert program.fun_name == "<lambda>"
    other = eqxc.nn.MultiheadAttention(2, 16, key=jax.random.key(1))
    for weights in (model, other):
        np.testing.assert_allclose(program.call(weights, X), attend(weights, X), rtol=1e-5)
        np.testing.assert_allclose(eqx.filter_jit(program.call)(weights, X), attend(weights, X), rtol=1e-5)


def test_another_process_needs_no_classes():
    model = Net()
    program = eqxc.export(apply)(model, TYPE)
    given = {".layers[0].weight": model.layers[0].weight, ".layers[0].bias": model.layers[0].bias}
    given |= {".layers[1].weight": model.layers[1].weight, ".layers[1].bias": model.layers[1].bias}
    (expected, _), _ = program.in_tree.unflatten(range(program.in_tree.num_leaves))
    statics = {key for key, value in expected.items() if value is None}
    assert statics > {".scale = 2.0", ".name = 'net'", ".activation = relu", ".layers[1].eps = 1e-05"}
    assert expected.keys() - statics == given.keys()
    given |= dict.fromkeys(statics)
    for called in (program, reloaded(program)):
        np.testing.assert_allclose(called.call(given, X), apply(model, X), rtol=1e-5)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Net(scale=3.0), r"missing args\[0\]\['\.scale = 2\.0'\]; unexpected args\[0\]\['\.scale = 3\.0'\]"),
        (Net(scale=2), r"missing args\[0\]\['\.scale = 2\.0'\]; unexpected args\[0\]\['\.scale = 2'\]"),
        (Net(name="other"), r"missing args\[0\]\[\".name = 'net'\"\]; unexpected args\[0\]\[\".name = 'other'\"\]"),
        (
            eqx.tree_at(lambda net: net.layers[0].bias, Net(), None),
            r"missing args\[0\]\['\.layers\[0\]\.bias'\]; unexpected nothing",
        ),
        (X, r"missing .*; unexpected args\[0\]\. What is not an array is part of the program"),
    ],
)
def test_another_static_value(other, message):
    program = eqxc.export(apply)(Net(), TYPE)
    with pytest.raises(TypeError, match=message):
        program.call(other, X)


def test_static_arguments():
    def f(x, *, power, flag):
        return x**power if flag else x

    program = eqxc.export(f)(TYPE, power=2, flag=True)
    np.testing.assert_array_equal(program.call(X, power=2, flag=True), X**2)
    with pytest.raises(TypeError, match=r"missing kwargs\['power'\]\[' = 2'\]; unexpected kwargs\['power'\]\[' = 3'\]"):
        program.call(X, power=3, flag=True)
    with pytest.raises(TypeError, match=r"expected 1 positional arguments and the keywords \['flag', 'power'\]"):
        program.call(X)
    assert reloaded(program).call(X, power={" = 2": None}, flag={" = True": None}).shape == X.shape


def test_numbers_in_place_of_arrays():
    """As JAX takes them."""
    program = eqxc.export(lambda x, y: x * y[0])(TYPE, [jnp.float32(2)])
    np.testing.assert_array_equal(program.call(X, [3.0]), X * 3)


def test_results_are_passed_on():
    """A Module comes back as a dict, which stands for it."""

    def step(cache, k):
        cache = cache.append(k, 2 * k)
        return cache, cache.attend(jnp.ones((1, 2, 8)))

    cache, k = eqxc.nn.KVCache(max_length=4, kv_heads=2, size=8), jnp.ones((1, 2, 8))
    program = eqxc.export(step)(cache, k)
    state = wanted = cache
    for run in (program.call, program.call, reloaded(program).call):
        state, out = run(state, k)
        wanted, wanted_out = step(wanted, k)
        assert isinstance(state, dict)
        np.testing.assert_allclose(out, wanted_out, rtol=1e-6)


class Dropping(eqx.Module):
    linear: eqxc.nn.Linear
    drop: eqx.nn.Dropout

    def __call__(self, x, *, key):
        return self.drop(self.linear(x), key=key)


def test_results_with_numbers_are_passed_on():
    """A Dropout has two of them as leaves."""

    def step(model, x, key):
        loss = lambda model: (model(x, key=key) ** 2).sum()
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, eqx.filter_grad(loss)(model)))

    model, x = Dropping(eqxc.nn.Linear(16, 16, key=KEY), eqx.nn.Dropout(0.5)), X[0]
    program = eqxc.export(step)(model, x, KEY)
    state: Any = model
    wanted = model
    for run in (program.call, program.call, reloaded(program).call):
        state, wanted = run(state, x, KEY), step(wanted, x, KEY)
        np.testing.assert_allclose(state[".linear.weight"], wanted.linear.weight, rtol=1e-5, atol=1e-6)
    assert state.keys() >= {".drop.p = 0.5", ".drop.inference = False"}


def test_numbers_among_results():
    out = eqxc.export(lambda x: {"x": x, "n": 3})(TYPE).call(X)
    assert out["n"] == 3


@pytest.mark.parametrize("platforms", ["cpu", ("gpu",), ["cpu", "CUDA"], [3], 3])
def test_unknown_platforms(platforms):
    with pytest.raises(
        ValueError,
        match=r"export: expected platforms to be a list of some of \('cpu', 'cuda', 'rocm', 'tpu'\) or None; got",
    ):
        eqxc.export(jnp.sin, platforms=platforms)


def test_refs_are_no_arguments():
    with pytest.raises(
        TypeError, match=r"export: expected arrays; args\[0\]\['r'\] is a jax.Ref, .* Pass the array ref"
    ):
        eqxc.export(lambda refs, x: refs["r"][...] + x)({"r": jax.new_ref(X)}, X)

    def inside(x):
        ref = jax.new_ref(x)
        ref[...] += 1
        return ref[...]

    np.testing.assert_array_equal(eqxc.export(inside)(TYPE).call(X), X + 1)


def test_registered_nodes_and_keys():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Pair:
        key: jax.Array
        x: jax.Array

    f = lambda pair: jax.random.normal(pair.key, pair.x.shape) + pair.x
    program = eqxc.export(f)(Pair(KEY, X))
    np.testing.assert_allclose(program.call(Pair(KEY, X)), f(Pair(KEY, X)), rtol=1e-6)
    np.testing.assert_allclose(reloaded(program).call({".key": KEY, ".x": X}), f(Pair(KEY, X)), rtol=1e-6)


def test_a_jitted_function_keeps_its_options(mesh):
    sharding = jax.NamedSharding(mesh, jax.P(None, "d"))
    program = eqxc.export(jax.jit(lambda x: x + 1, in_shardings=sharding))(TYPE)
    assert program.nr_devices == 4
    assert eqxc.export(eqx.filter_jit(apply))(Net(), TYPE).call(Net(), X).shape == X.shape
    assert eqxc.export(jax.jit(lambda x: eqxc.nn.RMSNorm(16)))(TYPE).call(X)[".weight"].shape == (16,)


def test_derivatives_of_a_program():
    model = Net()
    program = eqxc.export(apply)(model, TYPE)
    got = jax.grad(lambda x: program.call(model, x).sum())(X)
    np.testing.assert_allclose(got, jax.grad(lambda x: apply(model, x).sum())(X), rtol=1e-4, atol=1e-6)


B, N = jax.export.symbolic_shape("b, n")


def symbolic(*shape: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


OF_ANY_SIZE: dict[str, Any] = {
    "norm": (eqxc.ops.rms_norm, [symbolic(B, 8)]),
    "mapped": (jax.vmap(eqxc.nn.LayerNorm(8)), [symbolic(B, 8)]),
    "attention": (lambda x: eqxc.ops.attention(x, x, x, causal=True), [symbolic(B, 2, 8)]),
    "attention, a mask of keys": (
        lambda x, y: eqxc.ops.attention(x, x, x, mask=y[:, 0] > 0),
        [symbolic(B, 2, 8), symbolic(B, 1)],
    ),
    "attention, dropout": (
        lambda x: eqxc.ops.attention(x, x, x, dropout=0.5, key=KEY),
        [symbolic(B, 2, 8)],
    ),
    "attention, mapped": (jax.vmap(lambda x: eqxc.ops.attention(x, x, x)), [symbolic(N, B, 2, 8)]),
    "gradient": (jax.grad(lambda x: eqxc.ops.attention(x, x, x, causal=True).sum()), [symbolic(B, 2, 8)]),
    "softmax": (eqxc.ops.softmax, [symbolic(B, N)]),
    "gate": (eqxc.ops.swiglu, [symbolic(B, 8), symbolic(B, 8)]),
}


@pytest.mark.parametrize("name", OF_ANY_SIZE)
def test_sizes_may_be_symbols(name):
    f, types = OF_ANY_SIZE[name]
    program = reloaded(eqxc.export(f)(*types))
    assert "@eqxcallback_" in program.mlir_module()
    for b, n in ((5, 3), (2, 7)):
        known: dict[Any, int] = {B: b, N: n}
        shapes: list[Any] = [tuple(known.get(size, size) for size in t.shape) for t in types]
        args = [jax.random.normal(KEY, shape) for shape in shapes]
        np.testing.assert_allclose(program.call(*args), f(*args), rtol=1e-4, atol=1e-5)


def mean_of_losses(x, weight):
    """With gradients that are computed with the value, from as many rows as fit."""
    labels = jnp.zeros(x.shape[:1], jnp.int32)

    def loss(x, weight):
        return eqxc.ops.linear_cross_entropy(x, weight, labels, reduction="mean")

    return jax.value_and_grad(loss, argnums=(0, 1))(x, weight)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_functions_in_jax_that_depend_on_sizes_leave_symbols_to_the_reference(platform):
    types = [symbolic(B, 8), symbolic(20, 8)]
    program = eqxc.export(mean_of_losses, platforms=[platform])(*types)
    assert "@eqxcallback_" not in program.mlir_module()
    if platform == "cpu":
        for rows in (3, 300):
            args = jax.random.normal(KEY, (rows, 8)), jax.random.normal(KEY, (20, 8))
            got, want = program.call(*args), mean_of_losses(*args)
            jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5), got, want)
    q = symbolic(B, 2, 8)
    assert eqxc.export(eqxc.ops.attention, platforms=[platform])(q, q, q).mlir_module()


def test_kernels_that_depend_on_sizes_leave_symbols_to_the_reference():
    few = eqxc.nn.Linear(16, 8, dtype=jnp.bfloat16, key=KEY)  # has a kernel for few rows
    rows = jax.ShapeDtypeStruct((B, 16), jnp.bfloat16)
    assert "@eqxcallback_" not in eqxc.export(jax.vmap(few))(rows).mlir_module()
    on_gpu = eqxc.export(eqxc.ops.rms_norm, platforms=["cuda"])(symbolic(B, 8))
    assert "@eqxcallback_" not in on_gpu.mlir_module()
    norm = eqxc.nn.RMSNorm(8, implementation="cuda")
    with pytest.raises(
        ValueError, match="what it is called with depends on sizes, and an exported program has symbols in their place"
    ):
        eqxc.export(jax.vmap(norm), platforms=["cuda"])(symbolic(B, 8))
