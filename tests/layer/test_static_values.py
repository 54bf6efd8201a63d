"""Static values of layers and calls: those that are equal but not the same have programs of their own."""

import dataclasses
import decimal
import enum
import fractions
import gc
import weakref
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback.core import strict

from .layers import X, assert_close, struct


SAME: list[Any] = [1, True, 1.0, 0, False, 0.0, -0.0, complex(0, -0.0), 0j, 1j]
# Of which Equinox warns if they are a static field themselves.
SAME_OF_NUMPY = [np.float32(0.0), np.float32(-0.0), np.int32(0), np.bool_(False)]


def text(value):
    return f"{type(value).__name__} {value!r}"


class Shows(eqxc.Layer):
    """A layer that shows the number of a static field, or of an argument, which no other value has."""

    field: Any = eqx.field(static=True, default=None)
    vmap_method = "fold"

    def kernel(self, ctx, out, x, argument=None):
        np.asarray(out)[...] = self.number(argument)

    def reference(self, x, argument=None):
        return jnp.full(x.shape, float(self.number(argument)))

    def number(self, argument):
        value = self.field if argument is None else argument
        while not isinstance(value, bool | int | float | complex | np.generic):
            value = next(iter(vars(value).values() if dataclasses.is_dataclass(value) else value))
        return [text(v) for v in (*SAME, *SAME_OF_NUMPY)].index(text(value))


@dataclasses.dataclass(frozen=True)
class Config:
    scale: Any


class Module(eqx.Module):
    scale: Any = eqx.field(static=True)


WRAPPERS = {
    "alone": lambda v: v,
    "tuple": lambda v: (v,),
    "nested": lambda v: (((v,),),),
    "frozenset": lambda v: frozenset([v]),
    "dataclass": Config,
    "dataclass in a tuple": lambda v: (Config((v,)),),
    "frozenset in a dataclass": lambda v: Config(frozenset([v])),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=list(WRAPPERS))
@pytest.mark.parametrize("order", [1, -1])
def test_equal_but_not_the_same(wrap, order):
    values = SAME if jax.tree.leaves(wrap(1)) == [1] else (*SAME, *SAME_OF_NUMPY)
    items = list(enumerate(values))[::order]
    for i, value in items:
        layer = Shows(wrap(value))
        assert layer(X)[0] == i
        assert jax.vmap(layer)(X)[0] == i
    for i, value in items:
        assert Shows()(X, wrap(value))[0] == i
        assert Shows()(X, argument=wrap(value))[0] == i


@pytest.mark.parametrize("wrap", [WRAPPERS["alone"], WRAPPERS["dataclass"]])
def test_equal_but_not_the_same_in_one_program(wrap):
    want = list(range(len(SAME)))
    f = lambda x: [Shows(wrap(value))(x)[0] for value in SAME]
    np.testing.assert_array_equal(jax.jit(f)(X), want)
    np.testing.assert_array_equal(jax.jit(jax.vmap(f))(X[None, :]), np.reshape(want, (-1, 1)))
    text = jax.jit(f).trace(X).lower(lowering_platforms=("tpu",)).as_text()
    assert all(f"{float(i):.6e}" in text for i in want)


def test_in_the_fields_of_other_modules():
    class Outer(eqxc.Layer):
        inner: Module
        vmap_method = "fold"

        def kernel(self, ctx, out, x):
            np.asarray(out)[...] = [text(v) for v in SAME].index(text(self.inner.scale))

        def out_type(self, x):
            return struct(x)

    for i, value in enumerate(SAME):
        assert Outer(Module(value))(X)[0] == i


def test_derivatives_of_the_same_but_not_equal():
    class Power(eqxc.Layer):
        kind: Any = eqx.field(static=True)
        vmap_method = "fold"

        def factor(self):
            return {"int": 1.0, "bool": 10.0, "float": 100.0}[type(self.kind).__name__] * np.copysign(1, self.kind)

        def kernel(self, ctx, out, x):
            np.asarray(out)[...] = np.asarray(x) * np.float32(self.factor())

        def reference(self, x):
            return x * float(self.factor())

        def backward(self, ctx, grads, args, out, cotangents):
            np.asarray(grads[1])[...] = np.asarray(cotangents) * np.float32(self.factor())

    kinds, want = [1, True, 1.0, -0.0, 0.0], [1, 10, 100, -100, 100]
    one = jnp.float32(1)
    assert [float(jax.grad(Power(kind))(one)) for kind in kinds] == want
    assert [float(jax.jvp(Power(kind), (one,), (one,))[1]) for kind in kinds] == want
    assert jax.jit(jax.grad(lambda x: sum(Power(kind)(x) for kind in kinds)))(one) == sum(want)


def test_equal_specifications_are_one():
    calls = []

    class Takes(eqxc.Layer):
        config: Config = eqx.field(static=True)
        vmap_method = "fold"

        def kernel(self, ctx, out, x, f):
            np.asarray(out)[...] = f(np.asarray(x))

        def out_type(self, x, f):
            calls.append(f)
            return struct(x)

    Takes(Config((1, "a")))(X, np.sin)
    Takes(Config((1, "a")))(X, np.sin)
    assert len(calls) == 1
    Takes(Config((1, "b")))(X, np.sin)
    Takes(Config((1, "a")))(X, np.cos)
    assert len(calls) == 3


def test_instances_of_which_a_kernel_depends_on_static_fields():
    class Repeat(eqxc.Layer):
        count: int = eqx.field(static=True)
        vmap_method = "fold"

        def kernel(self, ctx, out, x):
            np.asarray(out)[...] = np.tile(np.asarray(x), self.count)

        def reference(self, x):
            return jnp.tile(x, self.count)

    for count in (1, 3, 2, 3):
        assert Repeat(count)(X).shape == (3 * count,)
    out = jax.jit(lambda x: [Repeat(count)(x) for count in (1, 2, 3)])(X)
    assert [o.shape[0] for o in out] == [3, 6, 9]


def test_a_leaf_that_is_static_or_traced():
    """A leaf of one class and one value: as a number it is static, as an array it is an operand."""

    class Scale(eqxc.Layer):
        factor: Any
        vmap_method = "fold"

        def kernel(self, ctx, out, x):
            np.asarray(out)[...] = np.asarray(x) * np.float32(np.asarray(self.factor))

        def reference(self, x):
            return x * jnp.asarray(self.factor, x.dtype)

    for factor in (2.0, np.float32(2), jnp.float32(2), 2, np.float64(2)):
        assert_close(Scale(factor)(X), 2 * X)
    assert_close(jax.grad(lambda layer: layer(X).sum())(Scale(2.0)).factor, X.sum())


def test_static_dictionaries():
    class Kind(eqxc.Layer):
        options: dict[str, Any] = eqx.field(static=True)
        vmap_method = "fold"

        def kernel(self, ctx, out, x):
            np.asarray(out)[...] = ["int", "bool", "float"].index(type(self.options["a"]).__name__)

        def out_type(self, x):
            return struct(x)

    assert [int(Kind({"a": value})(X)[0]) for value in (1, True, 1.0)] == [0, 1, 2]


class Pair(NamedTuple):
    scale: Any


class Triple(NamedTuple):
    scale: Any


class Word(enum.StrEnum):
    A = "a"


# In which all are equal, and no two are the same.
OF_OTHER_TYPES: dict[str, list[Any]] = {
    "texts": ["a", Word.A],
    "numbers": [0.5, fractions.Fraction(1, 2), decimal.Decimal("0.5")],
    "tuples": [(1,), (True,), Pair(1), Pair(1.0), Triple(1)],
    "dtypes": [np.dtype("float32"), "float32", np.float32, jnp.float32],
    "types": [float, np.dtype(float)],
    "places": [("a", Word.A), (Word.A, "a")],
    "dictionaries": [{1: 2}, {True: 2}, {1: 2.0}],
    "slices": [slice(1), slice(1.0), slice(True)],
}


class Seen(eqxc.Layer):
    field: Any = eqx.field(static=True)

    def kernel(self, ctx, out, x):
        SEEN.append(self.field)
        out.write(x)

    def reference(self, x):
        return x


SEEN: list[Any] = []


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("values", OF_OTHER_TYPES.values(), ids=list(OF_OTHER_TYPES))
def test_equal_and_of_other_types(values, order):
    """Each kernel sees the value of its own layer, whichever was called before."""

    class Here(Seen):
        pass

    for value in values[::order]:
        SEEN.clear()
        jax.block_until_ready(Here(value)(X))
        assert [text(seen) for seen in SEEN] == [text(value)]


def test_without_a_hash():
    """Such a field is compared as its tree is."""
    for value in (["a"], bytearray(b"a"), [bytearray(b"a")]):
        np.testing.assert_array_equal(Seen(value)(X), X)


def test_how_long_a_static_value_is_kept():
    """Until 512 other kinds of calls have come."""

    class Object:
        pass

    def captures(thing):
        return lambda: thing

    alive = []
    for _ in range(600):
        thing = Object()
        alive.append(weakref.ref(thing))
        Seen(captures(thing))(X)
        SEEN.clear()
        del thing
    gc.collect()
    assert sum(reference() is not None for reference in alive) <= 512


@dataclasses.dataclass(eq=False)
class Node:
    """Equal to itself alone, and part of what it has."""

    parent: Any = None
    name: str = dataclasses.field(init=False)


def test_an_object_that_is_equal_to_itself_alone_may_refer_to_itself():
    class Adds(eqxc.Layer):
        node: Node = eqx.field(static=True)
        vmap_method = "fold"

        def kernel(self, ctx, out, x):
            np.add(np.asarray(x), 1, out=np.asarray(out))

        def reference(self, x):
            return x + 1

    node = Node()
    node.parent = [node]
    np.testing.assert_array_equal(jax.jit(lambda x: Adds(node)(x))(X), np.asarray(X) + 1)


def test_what_a_dataclass_does_not_compare_makes_no_other_value():
    @dataclasses.dataclass(frozen=True)
    class Cached:
        scale: float
        cache: dict[str, float] = dataclasses.field(default_factory=dict, compare=False)

    first, second = Cached(1.0, {"a": 1.0}), Cached(1.0)
    assert strict(first) == strict(second)
    assert strict(first) != strict(Cached(1, {"a": 1.0}))
    hash(strict(first))
