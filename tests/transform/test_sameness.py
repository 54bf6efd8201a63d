"""Ops and callbacks that are equal and not the same, or called with modules that are: none runs another one's program."""

import copy
import dataclasses
import gc
import operator
import pickle
import weakref
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import CKernel, Op, PythonKernel


X = jnp.asarray([-1.0, 2.0])
TYPE = jax.ShapeDtypeStruct(X.shape, X.dtype)
# Equal, and no two of the same: what divides by the last two tells them apart.
SCALES = [1, True, 1.0, np.float32(1), 0.0, -0.0]


class Scaled(eqx.Module):
    array: jax.Array
    scale: Any = eqx.field(static=True)


def text(value):
    return f"{type(value).__name__} {value!r}"


SEEN: list[str] = []


def scale(ctx, out, module):
    SEEN.append(text(module.scale))
    np.multiply(module.array, np.float32(module.scale), out=np.asarray(out))


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
@pytest.mark.parametrize(
    "function",
    [
        Op("scale", kernels={"cpu": PythonKernel(scale)}, reference=lambda module: module.array * float(module.scale)),
        eqxc.buffer_callback(scale, TYPE),
    ],
    ids=["op", "buffer_callback"],
)
def test_static_fields_of_arguments(function):
    for value in [*SCALES, *SCALES[::-1]]:
        SEEN.clear()
        for call in (function, lambda module: jax.jit(lambda x: function(Scaled(x, module.scale)))(module.array)):
            got = call(Scaled(X, value))
            want = np.asarray(X) * np.float32(value)
            np.testing.assert_array_equal(got, want)
            np.testing.assert_array_equal(np.signbit(got), np.signbit(want))
        assert set(SEEN) == {text(value)}


def test_gradients_of_static_fields_of_arguments():
    op = Op("scale", kernels={"cpu": PythonKernel(scale)}, reference=lambda module: module.array * float(module.scale))
    for value in (0.0, -0.0):
        gradient = jax.grad(lambda module: op(module).sum())(Scaled(X, value))
        np.testing.assert_array_equal(1 / gradient.array, np.full(2, np.copysign(np.inf, value)))


class Double(NamedTuple):
    by: float

    def __call__(self, ctx, out, x):
        np.multiply(x, 2 * self.by, out=np.asarray(out))


class Negative(NamedTuple):
    by: float

    def __call__(self, ctx, out, x):
        np.multiply(x, -self.by, out=np.asarray(out))


def like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def test_bodies():
    """Named tuples of two classes are equal, and so are tuples of their fields."""
    ops = [Op("act", kernels={"cpu": PythonKernel(of(1.0), out_type=like)}) for of in (Double, Negative)]
    for call in (lambda op: op(X), lambda op: jax.jit(op)(X)):
        np.testing.assert_array_equal(call(ops[0]), 2 * X)
        np.testing.assert_array_equal(call(ops[1]), -X)


@dataclasses.dataclass(frozen=True)
class Divides:
    by: float

    def __call__(self, x):
        return x / self.by


def nothing(ctx, out, x):
    out.write(np.zeros(2, np.float32))


def test_references():
    ops = [Op("divides", kernels={"cpu": PythonKernel(nothing)}, reference=Divides(by)) for by in (0.0, -0.0)]
    assert ops[0] != ops[1]
    for op, infinity in zip(ops, (np.inf, -np.inf), strict=True):
        gradient = jax.grad(lambda x, op=op: op(x).sum())(X)
        np.testing.assert_array_equal(gradient, np.full(2, infinity))
    assert ops[0] == Op("divides", kernels={"cpu": PythonKernel(nothing)}, reference=Divides(0.0))


@dataclasses.dataclass(frozen=True)
class Length:
    """A function of a kernel of another kind."""

    length: Any

    def __call__(self, x):
        return jax.ShapeDtypeStruct(x.shape, jnp.float32 if isinstance(self.length, float) else jnp.int32)


def test_functions_of_kernels():
    source = "void zero(long bytes, char* out) { for (long i = 0; i < bytes; ++i) out[i] = 0; }"
    for length, dtype in ((1, jnp.int32), (1.0, jnp.float32)):
        kernel = CKernel("zero", source=source, parameters=("8", "out"), out_type=Length(length))
        assert Op("zero", kernels={"cpu": kernel})(X).dtype == dtype


def test_how_long_an_option_is_kept():
    """Until 512 other kinds of calls have come."""

    class Object:
        pass

    def captures(thing):
        return lambda: thing

    op = Op("keeps", kernels={"cpu": PythonKernel(lambda ctx, out, x, *, f: out.write(x))}, reference=lambda x, *, f: x)
    alive = []
    for _ in range(600):
        thing = Object()
        alive.append(weakref.ref(thing))
        op(X, f=captures(thing))
        del thing
    gc.collect()
    assert sum(reference() is not None for reference in alive) <= 512


CHANGES = {
    "setitem": lambda mapping: operator.setitem(mapping, "x", 1),
    "delitem": lambda mapping: operator.delitem(mapping, "x"),
    "or": lambda mapping: operator.ior(mapping, {}),
    "clear": lambda mapping: mapping.clear(),
    "pop": lambda mapping: mapping.pop("x", None),
    "popitem": lambda mapping: mapping.popitem(),
    "setdefault": lambda mapping: mapping.setdefault("x"),
    "update": lambda mapping: mapping.update(x=1),
}


def declare(methods, platforms, aliases) -> Any:
    """An op whose result is how many axes its kernel sees."""

    def axes(ctx, out, x):
        np.asarray(out)[...] = x.ndim

    kernel = PythonKernel(axes, aliases=aliases)
    return Op("axes", kernels=platforms | {"cpu": kernel}, reference=lambda x: x, vmap_method=methods, backward={})


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_mappings_are_as_they_were_declared(change):
    """A new one is equal and has the same hash, whichever way it was made; `dataclasses.replace` takes any."""
    mine = {"x": "fold"}, {"cuda": PythonKernel(scale)}, {0: 0}
    op = declare(*mine)
    for mapping in mine:
        mapping.clear()
    assert jax.vmap(op)(jnp.ones((3, 2))).tolist() == [[2, 2]] * 3
    kernel = op.kernels["cpu"][0]
    for mapping in (op.kernels, op.backward, op.vmap_method, kernel.aliases):
        before = dict(mapping)
        with pytest.raises(TypeError, match=r"^\w+(\(axes\))?\.\w+: expected the mapping to stay as it was declared"):
            change(mapping)
        assert mapping == before
        assert copy.deepcopy(mapping) == before
    assert copy.deepcopy(op) == op == dataclasses.replace(op)
    assert hash(op) == hash(dataclasses.replace(op, kernels=dict(op.kernels), vmap_method={"x": "fold"}))
    assert kernel == dataclasses.replace(kernel, aliases={0: 0})


def test_mappings_that_are_declared_can_be_pickled():
    kernel = CKernel("f", source="void f(float* x) {}", parameters=("x",), status={1: "bad"})
    again: Any = pickle.loads(pickle.dumps(kernel))
    assert again == kernel
    assert hash(again) == hash(kernel)
    with pytest.raises(
        TypeError, match=r"^CKernel\.status: expected the mapping to stay as it was declared, of 1; got"
    ):
        again.status[2] = "worse"
