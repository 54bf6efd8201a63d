"""What a layer is: its kernel, its arguments, its arrays, its results."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import eqxcallback as eqxc

from ..op.library import SAXPY
from .layers import WAVES, Identity, PureWave, W, Wave, X, assert_close, calls, lowered, struct


class Scale(eqxc.Layer):
    weight: jax.Array

    def kernel(self, ctx, out, x):
        np.multiply(x, self.weight, out=np.asarray(out))

    def reference(self, x):
        return x * self.weight


def test_ten_lines():
    layer = Scale(jnp.asarray(W))
    for got in (layer(X), jax.jit(lambda x: layer(x))(X), eqx.filter_jit(layer)(X)):
        np.testing.assert_array_equal(got, X * W)
        assert isinstance(got, jax.Array)
    np.testing.assert_array_equal(jax.vmap(layer)(np.stack([X, W])), np.stack([X * W, W * W]))
    np.testing.assert_array_equal(jax.grad(lambda x: layer(x).sum())(X), W)


@pytest.mark.parametrize("lane", WAVES)
def test_lanes(lane):
    layer = WAVES[lane](jnp.asarray(W), 3)
    for got in (layer(X), jax.jit(lambda layer, x: layer(x))(layer, X)):
        assert_close(got, PureWave(jnp.asarray(W), 3)(X))
    text = lowered(lambda layer, x: layer(x), layer, X)
    assert ("custom_call @eqxcallback_Wave_" in text) == (lane == "native")
    assert ("custom_call @eqxcallback_python" in text) == (lane != "native")


# The layer's own arrays and static fields.


class Inner(eqx.Module):
    arrays: list[Any]
    name: str


class Nested(eqxc.Layer):
    inner: Inner
    tree: dict[str, Any]
    pair: tuple[jax.Array, None]
    numpy: np.ndarray
    linear: eqx.nn.Linear
    activation: Callable[..., Any]
    number: float
    size: int = eqx.field(static=True)

    def kernel(self, ctx, out, x):
        assert type(self) is Nested
        assert type(self.inner) is Inner
        assert (self.inner.name, self.number, self.size, self.pair[1]) == ("a name", 0.5, 3, None)
        assert self.inner.arrays[1:] == [None, "text", 7]
        assert self.activation is jax.nn.relu
        assert self.linear.in_features == 3
        buffers = [self.inner.arrays[0], self.tree["a"][0], self.pair[0], self.numpy, self.linear.weight]
        assert all(isinstance(buffer, eqxc.Buffer) and not buffer.writeable for buffer in buffers)
        total = np.asarray(x) * self.number
        for buffer in buffers:
            total = total + np.asarray(buffer).sum()
        np.asarray(out)[...] = total

    def reference(self, x):
        arrays = (self.inner.arrays[0], self.tree["a"][0], self.pair[0], self.numpy, self.linear.weight)
        return x * self.number + sum(array.sum() for array in arrays)


def make_nested():
    return Nested(
        Inner([jnp.ones(2), None, "text", 7], "a name"),
        {"a": [jnp.ones((2, 2))], "b": None},
        (jnp.ones(()), None),
        np.ones(4, np.float32),
        eqx.nn.Linear(3, 3, key=jax.random.key(0)),
        jax.nn.relu,
        0.5,
        3,
    )


def test_arrays_anywhere_in_the_tree():
    layer = make_nested()
    for got in (layer(X), eqx.filter_jit(layer)(X), jax.vmap(layer)(X[None])[0]):
        assert_close(got, layer.reference(jnp.asarray(X)))
    gradient = eqx.filter_grad(lambda layer: layer(X).sum())(layer)
    assert_close(gradient.tree["a"][0], jnp.full((2, 2), 3.0))
    assert_close(gradient.numpy, np.full(4, 3, np.float32))


def test_a_number_becomes_an_operand_when_it_is_traced():
    class Affine(eqxc.Layer):
        scale: Any

        def kernel(self, ctx, out, x):
            kinds.append(type(self.scale))
            np.multiply(x, np.float32(np.asarray(self.scale)), out=np.asarray(out))

        def reference(self, x):
            return x * jnp.asarray(self.scale, x.dtype)

    kinds: list[type] = []
    assert_close(Affine(2.0)(X), 2 * X)
    assert_close(eqx.filter_jit(lambda layer, x: layer(x))(Affine(2.0), X), 2 * X)
    assert_close(jax.jit(lambda layer, x: layer(x))(Affine(2.0), X), 2 * X)
    assert kinds == [float, float, eqxc.Buffer]
    assert_close(jax.grad(lambda layer: layer(X).sum())(Affine(2.0)).scale, X.sum())


def test_methods_and_properties_work_in_a_kernel():
    class WithMethods(Scale):
        @property
        def doubled(self):
            return 2 * np.asarray(self.weight)

        def helper(self, x):
            return np.asarray(x) * self.doubled

        def kernel(self, ctx, out, x):
            np.asarray(out)[...] = self.helper(x)

        def reference(self, x):
            return x * 2 * self.weight

    assert_close(WithMethods(jnp.asarray(W))(X), 2 * X * W)


# Arguments.


class Sum(eqxc.Layer):
    """Weights tell which argument is which."""

    def kernel(self, ctx, out, x, y=2.0, *rest, scale, offset=3.0, **named):
        seen.append((y, [type(a) for a in rest], scale, offset, sorted(named)))
        total = np.asarray(x) + 10 * np.float32(np.asarray(y))
        for i, array in enumerate(rest):
            total = total + np.float32(100 * 2**i) * np.asarray(array)
        total = total * np.float32(np.asarray(scale)) + np.float32(np.asarray(offset))
        for name, array in named.items():
            total = total + np.float32(len(name)) * np.asarray(array)
        np.asarray(out)[...] = total

    def reference(self, x, y=2.0, *rest, scale, offset=3.0, **named):
        total = x + 10 * jnp.asarray(y, x.dtype)
        for i, array in enumerate(rest):
            total = total + 100 * 2**i * array
        total = total * jnp.asarray(scale, x.dtype) + jnp.asarray(offset, x.dtype)
        for name, array in named.items():
            total = total + len(name) * array
        return total


seen: list[Any] = []

ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "defaults": ((X,), {"scale": 1.0}),
    "by keyword": ((), {"x": X, "y": 1.0, "scale": 2.0}),
    "positional": ((X, X[0]), {"scale": 1.0, "offset": -1.0}),
    "rest": ((X, 1.0, W, X), {"scale": X[1]}),
    "named": ((X,), {"scale": 1.0, "zz": X, "a": W}),
    "all": ((X, 1.0, W), {"scale": 1.0, "offset": W[0], "zz": X, "a": W}),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_kind_of_argument(name):
    args, kwargs = ARGUMENTS[name]
    want = Sum().reference(*args, **kwargs)
    assert_close(Sum()(*args, **kwargs), want)
    assert_close(eqx.filter_jit(Sum())(*args, **kwargs), want)


def test_arguments_that_are_not_arrays_are_static():
    def double(x):
        return 2 * x

    class Static(eqxc.Layer):
        def kernel(self, ctx, out, x, mode, options, f=double):
            assert mode == "rows"
            assert options == {"k": (1, None, True), "a": [2.5]}
            assert type(options["k"][0]) is int
            assert options["k"][2] is True
            np.asarray(out)[...] = f(np.asarray(x))

        def out_type(self, x, mode, options, f):
            assert (mode, f) == ("rows", double)
            return struct(x)

    layer, options = Static(), {"k": (1, None, True), "a": [2.5]}
    assert_close(layer(X, "rows", options), 2 * X)
    assert_close(jax.jit(lambda x: layer(x, "rows", options=options))(X), 2 * X)
    assert_close(jax.vmap(lambda x: layer(x, "rows", options))(X[None])[0], 2 * X)


class Point(NamedTuple):
    x: Any
    y: Any


def test_trees_in_and_out():
    class Trees(eqxc.Layer):
        def kernel(self, ctx, out, point, mixed):
            assert type(point) is Point
            assert type(out["point"]) is Point
            assert (mixed["none"], mixed["name"], out["point"].y, out["none"], out["n"]) == (
                None,
                "n",
                "static",
                None,
                3,
            )
            np.multiply(point.x, mixed["k"][0], out=np.asarray(out["point"].x))
            np.copyto(np.asarray(out["list"][1]), np.asarray(point.y))

        def reference(self, point, mixed):
            return {"point": Point(point.x * mixed["k"][0], "static"), "list": [(), point.y], "none": None, "n": 3}

    def check(out):
        assert (type(out["point"]), out["point"].y, out["none"], out["n"]) == (Point, "static", None, 3)
        assert out["list"][0] == ()
        np.testing.assert_array_equal(out["point"].x, X * W)
        np.testing.assert_array_equal(out["list"][1], W)

    mixed = {"k": (X,), "none": None, "name": "n"}
    check(Trees()(Point(W, W), mixed))
    check(eqx.filter_jit(Trees())(Point(W, W), mixed))
    check(eqx.filter_jit(lambda point: Trees()(point=point, mixed=mixed))(Point(W, W)))


def test_no_arguments_and_no_results():
    class Constant(eqxc.Layer):
        value: int = eqx.field(static=True)

        def kernel(self, ctx, out):
            np.asarray(out)[...] = self.value

        def out_type(self):
            return jax.ShapeDtypeStruct((2,), jnp.int32)

    class Nothing(eqxc.Layer):
        def kernel(self, ctx, out, x):
            assert out == {"none": None, "empty": (), "text": "t"}

        def reference(self, x):
            return {"none": None, "empty": (), "text": "t"}

    np.testing.assert_array_equal(Constant(3)(), [3, 3])
    np.testing.assert_array_equal(jax.jit(lambda: Constant(4)())(), [4, 4])
    np.testing.assert_array_equal(jax.vmap(lambda x: Constant(5)() + x)(np.arange(2)[:, None]), [[5, 5], [6, 6]])
    want = {"none": None, "empty": (), "text": "t"}
    assert Nothing()(X) == want
    assert jax.vmap(lambda x: (Nothing()(x)["empty"], x))(X)[0] == ()
    np.testing.assert_array_equal(jax.grad(lambda x: (Nothing()(x), x.sum())[1])(X), np.ones(3))


# Kernels for platforms.


def scale_body(ctx, out, layer, x):
    assert type(layer) is Kernels
    np.multiply(x, layer.weight, out=np.asarray(out))


class Kernels(Scale):
    kernels: ClassVar[Any] = {"cpu": eqxc.PythonKernel(scale_body), "cuda": "on_cuda"}

    def on_cuda(self, ctx, out, x):
        raise NotImplementedError


def test_a_python_kernel_and_a_method_by_name():
    layer = Kernels(jnp.asarray(W))
    np.testing.assert_array_equal(layer(X), X * W)
    np.testing.assert_array_equal(jax.vmap(layer)(X[None])[0], X * W)
    np.testing.assert_array_equal(jax.grad(lambda x: layer(x).sum())(X), W)
    assert "eqxcallback_python" in lowered(layer.__call__, X, platform="cuda")


def test_one_program_for_several_platforms():
    layer = Kernels(jnp.asarray(W))
    text = jax.jit(layer.__call__).trace(X).lower(lowering_platforms=("cpu", "tpu")).as_text()
    assert text.count("custom_call @eqxcallback_python") == 1
    assert "stablehlo.case" in text


@pytest.mark.parametrize("make", [Scale, Kernels, Wave])
@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_the_reference_is_lowered_where_there_is_no_kernel(make, platform):
    layer = make(jnp.asarray(W))
    for f, x in ((layer, X), (jax.vmap(layer), X[None]), (jax.grad(lambda x: layer(x).sum()), X)):
        text = lowered(lambda x, f=f: f(x), x, platform=platform)
        assert "custom_call" not in text
        assert "stablehlo.multiply" in text


class Axpy(eqxc.Layer):
    a: float = eqx.field(static=True, default=2.0)
    kernels: ClassVar[Any] = {"cpu": eqxc.NativeKernel("Saxpy", SAXPY, attributes=("a",))}

    def reference(self, x, y):
        return self.a * x + y


class AxpyOfArgument(eqxc.Layer):
    kernels: ClassVar[Any] = {"cpu": eqxc.NativeKernel("Saxpy", SAXPY, attributes=("a",))}

    def reference(self, x, y, a=3.0):
        return a * x + y


def test_attributes_of_native_kernels():
    assert_close(Axpy()(X, W), 2 * X + W)
    assert_close(Axpy(-1.0)(X, W), W - X)
    layer = AxpyOfArgument()
    assert_close(layer(X, W), 3 * X + W)
    assert_close(layer(X, W, 4.0), 4 * X + W)
    assert_close(jax.jit(lambda x: layer(x, a=5.0, y=x))(X), 6 * X)
    assert_close(jax.vmap(lambda x: layer(x, W, 2.0))(X[None])[0], 2 * X + W)
    assert_close(jax.grad(lambda x: layer(x, W, 2.0).sum())(X), np.full(3, 2, np.float32))


@pytest.mark.parametrize(("name", "error"), [("alpha", ValueError), ("reference", TypeError)])
def test_an_attribute_that_there_is_not(name, error):
    class Wrong(Axpy):
        kernels: ClassVar[Any] = {"cpu": eqxc.NativeKernel("Saxpy", SAXPY, attributes=(name,))}

    with pytest.raises(error, match=name):
        Wrong()(X, W)


def test_out_type_alone():
    class Square(eqxc.Layer):
        def kernel(self, ctx, out, x):
            np.square(x, out=np.asarray(out))

        def out_type(self, x):
            assert isinstance(x, jax.ShapeDtypeStruct)
            return struct(x)

    np.testing.assert_array_equal(Square()(X), X * X)
    np.testing.assert_array_equal(jax.vmap(Square())(np.stack([X, W])), np.stack([X * X, W * W]))
    with pytest.raises(ValueError, match=r"Layer .*Square: .*`reference`"):
        lowered(Square().__call__, X, platform="tpu")


def test_out_type_of_the_reference():
    layer = make_nested()
    assert layer.out_type(X) == jax.ShapeDtypeStruct((3,), jnp.float32)
    assert jax.eval_shape(layer.__call__, X) == jax.ShapeDtypeStruct((3,), jnp.float32)


# Subclasses of layers that can be used themselves.


def test_subclasses():
    class Tripled(Scale):
        def kernel(self, ctx, out, x):
            np.asarray(out)[...] = 3 * np.asarray(x) * np.asarray(self.weight)

    class OtherDerivative(Scale):
        def reference(self, x):
            return 5 * x * self.weight

    class OtherMethod(Scale):
        vmap_method = "sequential"

        def kernel(self, ctx, out, x):
            calls.append(str(x.shape))
            Scale.kernel(self, ctx, out, x)

    class MoreFields(Scale):
        bias: jax.Array

        def kernel(self, ctx, out, x):
            super().kernel(ctx, out, x)
            np.asarray(out)[...] += np.asarray(self.bias)

        def reference(self, x):
            return super().reference(x) + self.bias

    weight = jnp.asarray(W)
    assert_close(Tripled(weight)(X), 3 * X * W)
    assert_close(Scale(weight)(X), X * W)
    assert_close(OtherDerivative(weight)(X), X * W)
    assert_close(jax.grad(lambda x: OtherDerivative(weight)(x).sum())(X), 5 * W)
    assert_close(jax.vmap(OtherMethod(weight))(np.stack([X, X])), np.stack([X * W] * 2))
    assert calls == ["(3,)", "(3,)"]
    assert_close(MoreFields(weight, weight)(X), X * W + W)


# Typed keys: kernels have the words.


class Keys(eqxc.Layer):
    key: jax.Array

    def kernel(self, ctx, out, key, x):
        assert self.key.dtype == key.dtype == np.uint32
        np.copyto(np.asarray(out["own"]), np.asarray(self.key))
        np.copyto(np.asarray(out["key"]), np.asarray(key))
        np.multiply(x, np.float32(2), out=np.asarray(out["x"]))

    def reference(self, key, x):
        return {"own": self.key, "key": key, "x": 2 * x}


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_typed_keys(impl):
    own, key = jax.random.key(7, impl=impl), jax.random.key(1, impl=impl)
    for f in (Keys(own), eqx.filter_jit(Keys(own))):
        out = f(key, X)
        assert out["own"] == own
        assert out["key"] == key
        assert out["key"].dtype == key.dtype
        np.testing.assert_array_equal(out["x"], 2 * X)
    assert "custom_call @eqxcallback" not in lowered(Keys(own).__call__, key, X, platform="tpu")
    gradient = jax.grad(lambda x: Keys(own)(key, x)["x"].sum())
    np.testing.assert_array_equal(gradient(X), np.full(3, 2))
    np.testing.assert_array_equal(jax.vmap(gradient)(X[None]), np.full((1, 3), 2))


@pytest.mark.parametrize("method", ["fold", "sequential", "sequential_unrolled", "broadcast_all"])
def test_typed_keys_under_vmap(method):
    class Mapped(Keys):
        vmap_method = method

    keys = jax.random.split(jax.random.key(0), 4).reshape(2, 2)
    own = jax.random.key(7)
    assert (jax.vmap(jax.vmap(Mapped(own), (0, None)), (0, None))(keys, X)["key"] == keys).all()
    assert (jax.vmap(Mapped(own), (None, 0))(own, np.stack([X, W]))["key"] == own).all()
    ensemble = eqx.filter_vmap(lambda layer: layer(own, X))(Mapped(keys[0]))
    assert (ensemble["own"] == keys[0]).all()
    _, scanned = jax.lax.scan(lambda c, key: (c, Mapped(own)(key, X)["key"]), 0, keys[1])
    assert (scanned == keys[1]).all()


# Types of operands.

DTYPES = [
    *("bool", "int8", "uint8", "int16", "int32", "uint32", "float16", "float32", "complex64", "bfloat16", "int4"),
    *("uint4", "int2", "float4_e2m1fn", "float8_e4m3fn", "float8_e5m2"),
]


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(name):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    x = np.array([[1, 0, 1], [1, 1, 0]]).astype(dtype)
    for f in (Identity(), jax.jit(Identity().__call__), jax.vmap(Identity())):
        got = f(jnp.asarray(x))
        assert got.dtype == dtype
        np.testing.assert_array_equal(np.asarray(got), x)


class IdentityWithBackward(Identity):
    def backward(self, ctx, grads, args, out, cotangents):
        assert grads[1].dtype == cotangents.dtype == args[0].dtype
        np.copyto(np.asarray(grads[1]), np.asarray(cotangents))


@pytest.mark.parametrize("layer", [Identity(), IdentityWithBackward()])
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float4_e2m1fn"])
def test_gradients_of_small_floats(name, layer):
    x = jnp.asarray([[1, 0, 1], [1, 1, 0]]).astype(name)
    gradient = jax.grad(lambda x: layer(x).astype(jnp.float32).sum())
    for f in (gradient, jax.vmap(gradient)):
        assert f(x).dtype == x.dtype
        np.testing.assert_array_equal(np.asarray(f(x), np.float32), np.ones((2, 3)))


def test_numpy_inputs():
    for x in (np.float32(3), np.int32(3), np.bool_(True), np.arange(6).reshape(2, 3).T, np.arange(3.0)[::-1]):
        got = Identity()(x)
        assert got.dtype == jnp.asarray(x).dtype  # of 32 bits
        np.testing.assert_array_equal(got, x)
    x = X.copy()
    Scale(jnp.asarray(W))(x)
    np.testing.assert_array_equal(x, X)


def test_x64(x64):
    for x in (np.arange(3.0), np.arange(3), jnp.float64(2), np.complex128(1j)):
        got = Identity()(x)
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got, x)


def test_results_follow_x64():
    class Positions(eqxc.Layer):
        def kernel(self, ctx, out, x):
            np.asarray(out)[...] = np.arange(x.shape[0])

        def reference(self, x):
            return jnp.arange(x.shape[0])

    assert Positions()(X).dtype == jnp.int32
    with jax.enable_x64(True):
        assert Positions()(X).dtype == jnp.int64
    assert Positions()(X).dtype == jnp.int32


def test_weak_types():
    """A Python number in an array gives way to other dtypes in JAX; in a kernel it has the dtype that it has."""
    weak = jnp.asarray(3.0)
    assert weak.weak_type
    for f in (Identity(), jax.jit(Identity().__call__)):
        assert not f(weak).weak_type
    assert jax.jit(Identity().__call__)(3.0).dtype == jnp.float32
    assert jax.grad(Identity())(3.0) == 1
    assert Identity()(3.0) == 3.0
    assert isinstance(Identity()(3.0), float)  # static
    _, out = jax.lax.scan(lambda c, _: (Identity()(c), c), jnp.float32(2), length=2)
    np.testing.assert_array_equal(out, [2, 2])


@pytest.mark.parametrize("layer", [Identity(), IdentityWithBackward(), Wave(jnp.ones(()))])
@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 2)])
def test_no_elements(shape, layer):
    x = jnp.zeros(shape)
    gradient = jax.grad(lambda x: layer(x).sum())
    for f in (layer, gradient, jax.vmap(layer), jax.vmap(gradient), jax.jit(lambda x: layer(x))):
        assert f(x).shape == shape
    if isinstance(layer, Wave):
        assert jax.grad(lambda layer: layer(x).sum())(layer).weight == 0


def test_read_only_inputs():
    class Writes(Identity):
        def kernel(self, ctx, out, x):
            np.asarray(x)[...] = 0

    with pytest.raises(eqxc.KernelError, match="read-only"):
        Writes()(X)


# Debugging modes of JAX.


def test_disable_jit():
    layer = Wave(jnp.asarray(W))
    want = PureWave(jnp.asarray(W))
    with jax.disable_jit():
        for f in (lambda f: f(X), lambda f: jax.jit(lambda x: f(x))(X), lambda f: jax.vmap(f)(X[None])):
            assert_close(f(layer), f(want))
        assert_close(jax.grad(lambda x: layer(x).sum())(X), jax.grad(lambda x: want(x).sum())(X))


def test_debug_nans():
    class Nan(Identity):
        def kernel(self, ctx, out, x):
            np.asarray(out)[...] = np.nan

    with jax.debug_nans(True):
        assert_close(jax.grad(lambda x: Wave(jnp.asarray(W))(x).sum())(X), np.cos(X) * W**2)
        with pytest.raises(FloatingPointError, match=r"\(nan\) encountered in .*Nan"):
            Nan()(X)


# A layer is a Module.


def test_module():
    layer = Wave(jnp.asarray(W))
    assert repr(Wave(layer.weight, 3)) == "Wave(weight=f32[3], power=3)"
    assert eqx.tree_equal(layer, Wave(jnp.asarray(W)))
    assert not eqx.tree_equal(layer, Wave(jnp.asarray(W), 3))
    assert not eqx.tree_equal(layer, Wave(jnp.asarray(X)))
    changed = eqx.tree_at(lambda layer: layer.weight, layer, jnp.asarray(X))
    assert_close(changed(X), PureWave(jnp.asarray(X))(X))
    assert_close(layer(X), PureWave(jnp.asarray(W))(X))
    arrays, static = eqx.partition(layer, eqx.is_array)
    assert_close(eqx.combine(arrays, static)(X), layer(X))
    with pytest.raises(AttributeError):
        layer.power = 3
    assert hash(Identity()) == hash(Identity())
    np.testing.assert_array_equal(jax.jit(Identity())(X), X)


def test_copies():
    layer = make_nested()
    want = layer(X)
    assert_close(copy.copy(layer)(X), want)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, layer)
    file.seek(0)
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x) if eqx.is_array(x) else x, layer)
    assert_close(eqx.tree_deserialise_leaves(file, zeros)(X), want)


def test_pickle():
    layer = Wave(jnp.asarray(W), 3)
    for copied in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert eqx.tree_equal(layer, copied)
        assert_close(copied(X), layer(X))


def test_the_program_names_the_layer():
    assert "op_call[call=Wave]" in str(eqx.filter_make_jaxpr(Wave(jnp.asarray(W)))(X)[0])
