"""Arguments that no call takes, and calls that return nothing: neither can be checked."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback.testing import check

from ..layers import Scale
from .catching import failed_rows, failures


X = jnp.arange(3.0)
LAYER = Scale(jnp.ones(3))


def double(ctx, out, x, *, by=2):
    out.write(np.asarray(x) * np.float32(by))


OP = eqxc.Op("double", {"cpu": eqxc.PythonKernel(double)}, lambda x, *, by=2: by * x, "fold")
TYPED = eqxc.Op("typed", {"cpu": eqxc.PythonKernel(double, out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))})


def negative(x):
    return -x


@pytest.mark.parametrize("target", [LAYER, OP, TYPED, negative, jax.jit(negative)])
def test_arguments_that_no_call_takes_are_one_error(target):
    with pytest.raises(
        TypeError, match=r"^testing\.check: .*unexpected keyword argument 'tol'.* check itself has (.*)\.$"
    ) as caught:
        check(target, X, tol=1e-3)
    own = [name for name, option in inspect.signature(check).parameters.items() if option.kind is option.KEYWORD_ONLY]
    assert str(caught.value).endswith(f"check itself has {', '.join(own)}.")
    assert {"rtol", "atol", "only", "skip"} <= set(own)
    with pytest.raises(TypeError, match=r"^testing\.check: .*missing (a|1) required .*'x'") as caught:
        check(target)
    assert "check itself" not in str(caught.value)
    with pytest.raises(TypeError, match=r"^testing\.check: .*positional argument"):
        check(target, X, X)


def test_what_a_call_takes_is_checked():
    """A layer drops a key that it has no use for, and a signature may be one of a function inside."""
    assert check(LAYER, X, key=jax.random.key(0), only="jit").passed
    assert check(OP, X, by=3, only="reference").passed

    @functools.wraps(negative)
    def with_offset(x, offset):
        return negative(x) + offset

    assert check(with_offset, X, X, only="jit").passed


def test_a_key_that_a_layer_ignores_is_no_argument():
    """Calls drop it, so the reference is not given it either, and it is not an array of the check."""
    report = check(LAYER, X, key=jax.random.key(0), only=["types", "stateless", "reference", "vmap", "grad", "scan"])
    assert {row.result for row in report.rows} == {"ok"}
    assert "key" not in report.subject
    assert check(Negative(), X, key=jax.random.key(0), only="reference", reference=negative).passed


class Negative(eqxc.Layer):
    vmap_method = "fold"

    def kernel(self, ctx, out, x):
        np.negative(np.asarray(x), out=np.asarray(out))

    def out_type(self, x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)


class Keyed(eqxc.Layer):
    vmap_method = "fold"

    def kernel(self, ctx, out, x, *, key):
        np.negative(np.asarray(x), out=np.asarray(out))

    def reference(self, x, *, key):
        return -x


def test_a_key_that_a_layer_takes_is_an_argument():
    report = check(Keyed(), X, key=jax.random.key(0), only=["types", "reference"])
    assert "key" in report.subject


def test_a_type_error_of_the_call_itself_is_for_the_rows():
    def refuses(x):
        raise TypeError("no more than 3 rows")

    assert failed_rows(refuses, X, only=("types", "jit")) == ["types", "jit"]


class Forgets(Scale):
    """Its reference has no `return`."""

    def reference(self, x):
        _ = self.weight * x


@pytest.mark.parametrize(
    "target", [pytest.param(lambda x: None, id="None"), pytest.param(lambda x: {"static": 3}, id="static")]
)
@pytest.mark.parametrize("options", [{}, {"only": ("outputs written", "vmap")}, {"skip": "types"}], ids=str)
def test_a_call_that_returns_nothing_has_not_passed(target, options):
    (row,) = failures(target, X, **options)
    assert row.name == "types"
    assert (
        "there is nothing to compare. Return the results, from the reference too, or declare has_side_effect"
        in row.detail
    )


def test_a_layer_whose_reference_forgets_to_return_has_not_passed():
    assert "types" in failed_rows(Forgets(jnp.ones(3)), X)


def test_a_call_that_returns_nothing_but_has_an_effect_is_checked():
    seen = []

    def noted(x):
        eqxc.debug.tap(lambda x, transforms: seen.append(x), x)

    assert check(noted, X, only=("types", "jit")).passed
    assert seen
