"""Static values of exported programs: another value is an error that names it, and the same value is the same everywhere."""

import dataclasses
import decimal
import fractions
import functools
import pathlib
import subprocess
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

import eqxcallback as eqxc


X = jnp.arange(32.0).reshape(2, 16) / 32
TYPE = jax.ShapeDtypeStruct(X.shape, X.dtype)


@dataclasses.dataclass(frozen=True)
class Config:
    scale: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["scale"])
@dataclasses.dataclass
class Scaled:
    x: jax.Array
    scale: float


class Configured(eqx.Module):
    config: Any = eqx.field(static=True)


class Active(eqx.Module):
    activation: Any


def times(scale, x):
    return scale * x


def product(k):
    def act(x):
        return x * k

    return act


def with_default(k):
    def act(x, k=k):
        return x * k

    return act


def with_keyword(k):
    def act(x, *, k=k):
        return x * k

    return act


def with_constant(k):
    code = f"def make():\n    def act(x):\n        return [y * {k} for y in [x]][0]\n    return act"
    made: dict[str, Any] = {}
    exec(code, made)
    return made["make"]()


def under_the_name_of_another(k):
    @functools.wraps(times)
    def act(x):
        return x * k

    return act


def recursive(k):
    def act(x, depth=0):
        return x * k if depth else act(x, 1)

    return act


def straight_through(k):
    act = jax.custom_vjp(lambda x: x)
    act.defvjp(lambda x: (x, ()), lambda _, ct: (k * ct,))
    return act


class Times:
    """A callable of an ordinary class, which refers to itself."""

    def __init__(self, k):
        self.k, self.me, self.method = k, self, self.act

    def __call__(self, x):
        return x * self.k

    act = __call__

    @functools.cached_property
    def square(self):
        return self.k**2


class Named(Times):
    def __repr__(self):
        return "Named"


class Slots:
    __slots__ = ("k",)

    def __init__(self, k):
        self.k = k


def keeps(make):
    """Two numbers, of which `make` makes what a Module keeps: as a leaf, and in a static field."""
    return [
        pytest.param(lambda k: Active(make(k)), 2, 3, id=f"{make.__qualname__}, a leaf"),
        pytest.param(lambda k: Configured(make(k)), 2, 3, id=f"{make.__qualname__}, static"),
    ]


KEPT = [
    *(product, with_default, with_keyword, with_constant, under_the_name_of_another, recursive, straight_through),
    *(Times, Named, Slots, range, fractions.Fraction, decimal.Decimal),
    lambda k: lambda x, y=k: x * y,
    lambda k: lambda x: x + 2 if k == 2 else x + 3,
    lambda k: Times(k).act,
    lambda k: [k].append,
    lambda k: frozenset({"a", "b", k}),
    lambda k: pathlib.Path(str(k)),
    lambda k: jax.jit(product(k)),
    lambda k: jax.vmap(product(k)),
    lambda k: jax.checkpoint(product(k)),
    lambda k: functools.lru_cache(product(k)),
    lambda k: product(product(k)),
    lambda k: product(np.full(1000, k)),
    lambda k: product(jnp.full(1000, k)),
    lambda k: product(jax.random.key(k)),
    lambda k: product(np.array([k, None], object)),
    lambda k: product([*range(1000), k]),
    lambda k: (lambda x: x + 2) if k == 2 else (lambda x: x * 2),
]


@pytest.mark.parametrize(
    ("make", "given", "other"),
    [
        (Partial, jnp.sin, jnp.cos),
        (lambda scale: Partial(times, scale), 2.0, 3.0),
        (lambda scale: functools.partial(times, scale), 2.0, 3.0),
        (lambda scale: functools.partial(times, x=scale), 2.0, 3.0),
        (lambda scale: Scaled(X, scale), 2.0, 3.0),
        (Configured, Config(2.0), Config(3.0)),
        (Configured, Config(np.arange(3)), Config(np.arange(3) + 1)),
        (Configured, Config(np.float32(2)), Config(np.float32(3))),
        (lambda function: Active(function), lambda x: jnp.sin(x), lambda x: jnp.cos(x)),
        (lambda function: Active(function), lambda x: x * 2.0, lambda x: x * 3.0),
        (lambda k: Active(lambda x: x * k), 2.0, 3.0),
        *(case for make in KEPT for case in keeps(make)),
    ],
)
def test_what_is_static_beside_leaves(make, given, other):
    program = eqxc.export(lambda tree, x: x)(make(given), TYPE)
    np.testing.assert_array_equal(program.call(make(given), X), X)
    with pytest.raises(
        TypeError, match=r"expected the arguments that the program was exported with; missing args\[0\]"
    ):
        program.call(make(other), X)


def texts():
    """One for each of `KEPT`."""
    return [next(iter(eqxc.export(lambda kept: X)(Configured(make(2))).in_tree.unflatten([])[0][0])) for make in KEPT]


def test_texts_of_static_values_are_short_and_the_same_in_each_process():
    here = texts()
    assert max(map(len, here)) < 1000
    code = "import tests.program.test_static_values as t; print(t.texts())"
    root = pathlib.Path(__file__).parents[2]
    process = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert process.stdout == f"{here}\n"


def test_what_a_static_value_computed_for_itself_does_not_count():
    times = Times(2)
    callback = eqxc.buffer_callback(lambda ctx, out, x: out.write(x), TYPE)
    tree = Configured((times, callback))
    program = eqxc.export(lambda tree, x: x)(tree, TYPE)
    assert times.square == 4
    np.testing.assert_array_equal(callback(X), X)
    np.testing.assert_array_equal(program.call(tree, X), X)


def test_the_error_shows_what_differs():
    program = eqxc.export(lambda model, x: model.activation(x))(Active(product(2)), TYPE)
    with pytest.raises(
        TypeError, match=r"missing .*product\.<locals>\.act.*'k': 2.*unexpected .*<locals>\.act.*'k': 3"
    ):
        program.call(Active(product(3)), X)
