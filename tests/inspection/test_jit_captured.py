"""`eqxcallback.jit_captured` as a function. What it makes of programs for a GPU: tests/deviceless/test_jit_captured.py."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import xla

from .layers import AddOne, Scale


X = jnp.ones(3)
scale, add_one = Scale(X * 2), AddOne()


def test_calls():
    np.testing.assert_array_equal(eqxc.jit_captured(scale)(X), 2 * X)
    size: Any = np.int64(3)
    np.testing.assert_array_equal(eqxc.jit_captured(scale, loops=False, min_graph_size=size)(X), 2 * X)


def test_decorators():
    @eqxc.jit_captured
    def bare(x, name, *, y=1.0):
        """Says."""
        assert name == "static"
        return scale(x) + y

    @eqxc.jit_captured(donate="warn", min_graph_size=2)
    def with_options(x):
        return scale(x)

    np.testing.assert_array_equal(bare(X, "static", y=2.0), 2 * X + 2)
    np.testing.assert_array_equal(with_options(jnp.ones(3)), 2 * X)
    assert (bare.__name__, bare.__doc__, repr(bare)) == ("bare", "Says.", "jit_captured(bare)")
    assert with_options.compiler_options["xla_gpu_graph_min_graph_size"] == 2


def test_methods():
    class Model(eqx.Module):
        layer: Scale

        @eqxc.jit_captured
        def __call__(self, x):
            return self.layer(x)

        @eqxc.jit_captured
        def step(self, x):
            return self.layer(x)

    model = Model(scale)
    np.testing.assert_array_equal(model.step(X), 2 * X)
    np.testing.assert_array_equal(model(X), 2 * X)
    assert [call.op for call in eqxc.inspect(model.step, X).calls] == ["Scale"]


def test_donation():
    x = jnp.ones(3)
    y = eqxc.jit_captured(add_one, donate="all")(x)
    np.testing.assert_array_equal(y, X + 1)
    assert x.is_deleted()
    kept, given = jnp.ones(3), jnp.ones(3)
    eqxc.jit_captured(lambda a, b: add_one(b) + a, donate="all-except-first")(kept, given)
    assert (kept.is_deleted(), given.is_deleted()) == (False, True)


def test_lower():
    lowered = eqxc.jit_captured(scale).lower(X)
    assert "eqxcallback_python" in lowered.as_text()
    np.testing.assert_array_equal(lowered.compile()(X), 2 * X)


def test_under_transformations():
    """JAX refuses compiler options there; see eqxcallback/xla/programs/_staging.py."""
    f = eqxc.jit_captured(lambda x: (scale(x) ** 2.0).sum())
    expected = jax.grad(lambda x: ((2 * x) ** 2).sum())(X)
    np.testing.assert_allclose(jax.grad(f)(X), expected)
    np.testing.assert_allclose(jax.jit(jax.grad(f))(X), expected)
    np.testing.assert_allclose(jax.vmap(f)(jnp.ones((2, 3))), [12, 12])
    np.testing.assert_allclose(jax.jit(f)(X), 12)
    np.testing.assert_allclose(jax.lax.scan(lambda c, _: (c + f(X), None), 0.0, length=2)[0], 24)
    np.testing.assert_allclose(eqxc.jit_captured(f)(X), 12)
    with pytest.raises(ValueError, match="can only be passed to top-level"):
        jax.jit(lambda x: f._captured(x))(X)


def test_what_is_outermost(mesh):
    seen = []

    def f(x):
        seen.append(xla.is_outermost())
        return x * 2.0

    f(X)
    with jax.set_mesh(mesh), jax.enable_x64(True), jax.default_matmul_precision("float32"):
        f(X)
    assert seen == [True, True]
    for transformed in (jax.jit(f), jax.vmap(f), jax.make_jaxpr(f), jax.jacfwd(f)):
        transformed(X)
    assert not any(seen[2:])


def test_options_of_the_user_win():
    options = {"xla_gpu_graph_min_graph_size": 7, "xla_cpu_enable_fast_math": False}
    fn = eqxc.jit_captured(scale, compiler_options=options)
    assert fn.compiler_options == {**eqxc.jit_captured(scale).compiler_options, **options}
    np.testing.assert_array_equal(fn(X), 2 * X)
    commands = "xla_gpu_enable_command_buffer"
    assert commands not in eqxc.jit_captured(scale, loops=False).compiler_options
    np.testing.assert_array_equal(eqxc.jit_captured(scale, scans=True)(X), 2 * X)
    listed = eqxc.jit_captured(scale).compiler_options[commands].split(",")
    assert {"CUSTOM_CALL", "CONDITIONAL", "WHILE"} < set(listed)


def test_inspect():
    report = eqxc.inspect(eqxc.jit_captured(add_one, donate="all"), X)
    assert (report.program, report.stage) == ("AddOne", "compiled")
    assert report.calls[0].in_place[0].state == "in place"
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'nonsense'"):
        eqxc.inspect(eqxc.jit_captured(add_one, compiler_options={"nonsense": 1}), X)


def test_other_arguments_are_those_of_filter_jit():
    assert eqxc.jit_captured(lambda x: x, inline=True)(X) is not None


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"donate": True}, ValueError, r"expected donate to be one of \('all', .*; got True\."),
        (
            {"min_graph_size": 0},
            ValueError,
            "expected min_graph_size to be an integer of at least 1; got 0. For XLA's own",
        ),
        ({"min_graph_size": 1.0}, ValueError, "expected min_graph_size to be an integer of at least 1; got 1.0"),
        ({"min_graph_size": True}, ValueError, "expected min_graph_size to be an integer of at least 1; got True"),
        (
            {"static_argnums": 1},
            ValueError,
            r"expected arguments of equinox.filter_jit; got static_argnums, .* What is not an array is static already\.",
        ),
        ({"static_argnames": "n"}, ValueError, r"expected .*; got static_argnames, .* is static already\."),
        ({"donate_argnums": 0}, ValueError, r"expected .*; got donate_argnums, .* Use donate=, one of \('all', "),
        ({"donate_argnames": "x"}, ValueError, r"expected .*; got donate_argnames, .* Use donate=, one of"),
        ({"in_shardings": None}, ValueError, r"expected .*; got in_shardings, .* Use jax.device_put"),
        ({"out_shardings": None}, ValueError, r"expected .*; got out_shardings, .* Use jax.device_put"),
        ({"loops": 1}, TypeError, "expected loops to be True or False; got 1 of type int"),
        ({"scans": 1}, ValueError, "expected scans to be True only with loops, or False; got 1, loops=True"),
        ({"scans": True, "loops": False}, ValueError, "expected scans to be True only with loops, .*; got True"),
        ({"compiler_options": "no"}, TypeError, "expected compiler_options to be a mapping, .*; got 'no' of type str"),
    ],
)
def test_bad_values(options, error, text):
    with pytest.raises(error, match=f"^eqxcallback.jit_captured: {text}"):
        eqxc.jit_captured(scale, **options)


def test_what_is_not_callable():
    with pytest.raises(TypeError, match="jit_captured: expected a function or a layer; got 3 of type int"):
        eqxc.jit_captured(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="jit_captured: expected a function or a layer; got 3 of type int"):
        eqxc.jit_captured(loops=False)(3)
