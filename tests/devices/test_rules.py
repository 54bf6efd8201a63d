"""`sharding`, the rule by which a kernel's own dimensions may be split."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from ..transform.library import SAXPY
from .layers import (
    Lane,
    Scale,
    ScaleBackward,
    add,
    calls,
    normal,
    put,
    run,
    run_and_compare,
    spec_of,
    squares,
    tanh,
    twice,
)


class Split(Scale):
    sharding = "d, d -> d"


class SplitBackward(ScaleBackward):
    sharding = "d, d -> d"


native = eqxc.Op(
    "scale_rows",
    {"cpu": eqxc.NativeKernel("ScaleRows", SAXPY, attributes=("shared",))},
    lambda x, weight, *, shared: x * weight,
    vmap_method="broadcast_all",
    sharding="d, d -> d",
)

LANES = [
    Lane("python", lambda w, x: Split(w)(x), tanh, 1),
    Lane("python-backward", lambda w, x: SplitBackward(w)(x), tanh, 2),
    Lane("native", lambda w, x: native(x, w, shared=False), lambda w, x: x * w),
]


@pytest.fixture(params=LANES, ids=str)
def lane(request):
    return request.param


SIZE = 6


@pytest.mark.parametrize("weight_spec", [(), ("b",), ("a",)], ids=str)
def test_own_dimensions(lane, grid, weight_spec):
    """Beside axes of `vmap`; the weight may be where it is used, elsewhere, or whole."""
    weight, x = put(normal(SIZE), grid, *weight_spec), put(normal(4, 2, SIZE), grid, "a", None, "b")
    ran = run_and_compare(twice, lane, weight, x)
    if weight_spec != ("a",):  # which would be taken for that dimension, being the first to say where it is
        assert {shape for _, shape in ran.calls} <= {(4, SIZE // 2)}
        assert ran.gathers == 0
        assert spec_of(ran.values) == jax.P("a", None, "b")
    for arguments in (0, 1, (0, 1)):
        ran = run_and_compare(lambda f, i=arguments: jax.grad(squares(twice(f)), i), lane, weight, x)
        assert ran.gathers == 0 or weight_spec == ("a",)
    if weight_spec != ("a",):  # the gradient of the weight is split as the weight is: summed over the other axis alone
        assert (ran.sums, spec_of(ran.values[0])) == (1, jax.P("b"))


def over_all(f):
    """Over all leading axes of x."""

    def mapped(weight, x):
        function = f
        for _ in range(x.ndim - 1):
            function = jax.vmap(function, (None, 0))
        return function(weight, x)

    return mapped


@pytest.mark.parametrize(
    "derivative",
    [
        lambda f: lambda w, x: jax.jvp(f, (w, x), (w, x)),
        lambda f: jax.hessian(squares(f)),
        lambda f: jax.grad(squares(jax.grad(squares(f), 1)), (0, 1)),
        lambda f: jax.vmap(jax.grad(squares(f), (0, 1)), (None, 0)),
        lambda f: jax.grad(lambda w, x: jax.lax.scan(lambda c, _: (f(w, c), None), x, None, length=3)[0].sum(), (0, 1)),
    ],
    ids=["jvp", "hessian", "reverse-over-reverse", "vmap of grad", "grad of scan"],
)
def test_derivatives(lane, grid, derivative):
    x = put(normal(2, 4, 2, SIZE), grid, None, "a", None, "b")
    ran = run_and_compare(lambda f: derivative(over_all(f)), lane, normal(SIZE), x)
    assert ran.gathers == 0


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_without_vmap(lane, kind):
    mesh = jax.make_mesh((4,), ("a",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        x = put(normal(8), mesh, "a")
        for weight in (put(normal(8) + 1, mesh, "a"), put(normal(8) + 1, mesh)):
            ran = run_and_compare(lambda f: f, lane, weight, x)
            assert {shape for _, shape in ran.calls} <= {(2,)}
            assert ran.gathers == 0
            run_and_compare(lambda f: jax.grad(squares(f), (0, 1)), lane, weight, x)


def test_sizes_that_the_mesh_does_not_divide(lane):
    mesh = jax.make_mesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    split = lambda x: jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P("a")))
    whole = jax.NamedSharding(mesh, jax.P())
    everywhere = {"in_shardings": whole, "out_shardings": whole}
    both = lambda f: lambda w, x: jax.value_and_grad(squares(f), (0, 1))(w, split(x))
    run_and_compare(both, lane, put(normal(SIZE), mesh), normal(SIZE), **everywhere)


# A dimension that the results lack, and one that only some operands have.


def product(ctx, out, x, y):
    calls.append(("forward", x.shape + y.shape))
    out.write(np.asarray(x) @ np.asarray(y))


def product_backward(ctx, grads, args, out, cotangents):
    x, y, d_out = (np.asarray(array) for array in (*args, cotangents))
    add(grads[0], d_out @ y.T)
    add(grads[1], x.T @ d_out)


@pytest.mark.parametrize("backward", [None, eqxc.PythonKernel(product_backward)])
def test_a_product_of_matrices(grid, backward):
    """Rows and columns may be split, and the gradients are sums over the other one; what is summed in the kernel is whole."""
    op = eqxc.Op(
        "product",
        {"cpu": eqxc.PythonKernel(product)},
        lambda x, y: x @ y,
        backward=backward,
        sharding="rows inner, inner columns -> rows columns",
    )
    lane = Lane("product", lambda x, y: op(x, y), lambda x, y: x @ y)
    x, y = put(normal(4, 3), grid, "a"), put(normal(3, 6), grid, None, "b")
    ran = run_and_compare(lambda f: f, lane, x, y)
    assert ran.calls == {("forward", (2, 3, 3, 3)): 4}
    assert ran.gathers == 0
    assert spec_of(ran.values) == jax.P("a", "b")
    for arguments in (0, 1, (0, 1)):
        ran = run_and_compare(lambda f, i=arguments: jax.grad(squares(f), i), lane, x, y)
        assert ran.gathers == 0
    assert [spec_of(value) for value in ran.values] == [jax.P("a"), jax.P(None, "b")]
    run_and_compare(lambda f: jax.grad(squares(jax.grad(squares(f))), (0, 1)), lane, x, y)
    inner = put(normal(4, 2), grid, "a", "b"), put(normal(2, 6), grid, "b", "a")
    ran = run_and_compare(lambda f: jax.value_and_grad(squares(f), (0, 1)), lane, *inner)
    assert {shape for _, shape in ran.calls} == {(2, 2, 2, 6)}


def test_dimensions_that_are_whole(grid):
    """`_`, and a name that some result lacks."""

    def kernel(ctx, out, x):
        calls.append(("forward", x.shape))
        out[0].write(2 * np.asarray(x))
        out[1].write(np.asarray(x).sum(-1))

    plain = lambda x: (x * 2, x.sum(-1))
    for rule in ("a _ -> a _, a", "a b -> a b, a", "... b -> ... b, ..."):
        op = eqxc.Op("two", {"cpu": eqxc.PythonKernel(kernel)}, plain, sharding=rule)
        ran = run(op, put(normal(4, SIZE), grid, "a", "b"))
        assert ran.calls.keys() == {("forward", (2, SIZE))}
        np.testing.assert_allclose(ran.values[1], normal(4, SIZE).sum(-1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", ["row n -> row bins", "row n -> row _", "row bins -> row new"])
def test_a_dimension_of_results_alone_is_whole(grid, rule):
    def kernel(ctx, out, x):
        calls.append(("forward", x.shape))
        out.write(np.repeat(np.asarray(x).sum(-1, keepdims=True), 3, -1))

    plain = lambda x: jnp.repeat(x.sum(-1, keepdims=True), 3, -1)
    op = eqxc.Op("bins", {"cpu": eqxc.PythonKernel(kernel)}, plain, "fold", sharding=rule)
    lane = Lane("bins", op, plain)
    x = put(normal(4, SIZE), grid, ("a", "b"))
    ran = run_and_compare(lambda f: f, lane, x)
    assert ran.calls == {("forward", (1, SIZE)): 4}
    assert (ran.gathers, spec_of(ran.values)) == (0, jax.P(("a", "b")))
    assert run_and_compare(lambda f: jax.grad(squares(f)), lane, x).gathers == 0
    assert run_and_compare(jax.vmap, lane, put(normal(2, 4, SIZE), grid, None, ("a", "b"))).gathers == 0


def test_a_length_of_one_is_shared(grid):
    """By all devices, as by all rows."""
    plain = lambda x, shift: x + shift

    def kernel(ctx, out, x, shift):
        calls.append(("forward", x.shape + shift.shape))
        out.write(np.asarray(x) + np.asarray(shift))

    op = eqxc.Op("shift", {"cpu": eqxc.PythonKernel(kernel)}, plain, sharding="n d, n d -> n d")
    lane = Lane("shift", op, plain)
    x, shift = put(normal(4, SIZE), grid, "a", "b"), put(normal(1, SIZE), grid, None, "b")
    ran = run_and_compare(lambda f: f, lane, x, shift)
    assert ran.calls == {("forward", (2, 3, 1, 3)): 4}
    assert ran.gathers == 0
    ran = run_and_compare(lambda f: jax.grad(squares(f), (0, 1)), lane, x, shift)
    assert (ran.gathers, ran.sums) == (0, 1)
    assert spec_of(ran.values[1]) == jax.P(None, "b")


def test_a_function_of_types_and_options(grid):
    plain = lambda x, *, axis: x / x.sum(axis, keepdims=True)

    def kernel(ctx, out, x, *, axis):
        calls.append(("forward", x.shape))
        out.write(plain(np.asarray(x), axis=axis))

    def rule(x, *, axis):
        return None if x.shape[0] == 1 else "_ d -> _ d" if axis == 0 else "n _ -> n _"

    op = eqxc.Op("shares", {"cpu": eqxc.PythonKernel(kernel)}, plain, sharding=rule)
    x = put(np.abs(normal(4, SIZE)), grid, "a", "b")
    for axis, shape in ((0, (4, 3)), (1, (2, SIZE))):
        lane = Lane("shares", lambda x, axis=axis: op(x, axis=axis), lambda x, axis=axis: plain(x, axis=axis))
        assert run_and_compare(lambda f: f, lane, x).calls.keys() == {("forward", shape)}
    one = put(np.abs(normal(1, SIZE)), grid, None, "b")
    assert run(lambda x: op(x, axis=1), one).calls.keys() == {("forward", (1, SIZE))}

    no_rule: Any = lambda x, **_: 3
    wrong = eqxc.Op("wrong", {"cpu": eqxc.PythonKernel(kernel)}, plain, sharding=no_rule)
    with pytest.raises(TypeError, match=r"Op\(wrong\).*expected sharding to return a rule such as .*; got 3"):
        wrong(x, axis=0)


def test_trees(grid):
    """Terms follow the flat arrays."""

    plain = lambda tree, scale: {"sum": (tree["a"] + tree["b"][0]) * scale[:, None]}

    def kernel(ctx, out, tree, scale):
        calls.append(("forward", tree["b"][0].shape))
        out["sum"].write((np.asarray(tree["a"]) + np.asarray(tree["b"][0])) * np.asarray(scale)[:, None])

    op = eqxc.Op("tree", {"cpu": eqxc.PythonKernel(kernel)}, plain, sharding="n d, n d, n -> n d")
    tree = {"a": put(normal(4, SIZE), grid, "a", "b"), "b": (put(normal(4, SIZE) + 1, grid, "a"),)}
    lane = Lane("tree", lambda *args: op(*args), plain)
    ran = run_and_compare(lambda f: f, lane, tree, normal(4))
    assert ran.calls == {("forward", (2, 3)): 4}
    run_and_compare(lambda f: jax.grad(lambda t, s: jnp.sum(f(t, s)["sum"] ** 2), (0, 1)), lane, tree, normal(4))


def test_residuals(grid):
    """The rule names them after the results."""

    class Exponential(eqxc.Layer):
        weight: jax.Array
        vmap_method = "fold"
        sharding = "d, d -> d, d"

        def kernel(self, ctx, out, x):
            calls.append(("forward", x.shape))
            value = np.exp(np.asarray(x) * np.asarray(self.weight))
            out[1].write(value)
            out[0].write(value + 1)

        def reference(self, x):
            return jnp.exp(x * self.weight) + 1

        def residual_type(self, x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype)

        def backward(self, ctx, grads, args, out, cotangents):
            inner = np.asarray(out[1]) * np.asarray(cotangents)
            add(grads[0].weight, inner * np.asarray(args[0]))
            add(grads[1], inner * np.asarray(self.weight))

    lane = Lane("residuals", lambda w, x: Exponential(w)(x), lambda w, x: jnp.exp(x * w) + 1)
    x = put(normal(4, 2, SIZE) / 4, grid, "a", None, "b")
    ran = run_and_compare(lambda f: jax.value_and_grad(squares(twice(f)), (0, 1)), lane, normal(SIZE) / 4, x)
    assert ran.gathers == 0
    assert {shape for _, shape in ran.calls} == {(4, 3)}


def kernel_like_x(ctx, out, x, w):
    out.write(np.asarray(x))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("d -> d", "a rule with 2 operands and 1 results"),
        ("... d, d", "a rule with 2 operands and 1 results"),
        ("... d, d -> ... d -> d", "a rule with 2 operands and 1 results"),
        ("x d, d -> x d, d", "a rule with 2 operands and 1 results"),
        ("", "a rule with 2 operands and 1 results"),
        ("d ..., d -> d ...", "`...` in front of a term"),
        ("... d ..., d -> ... d", "`...` in front of a term"),
        ("... d d, d -> ... d", "each once in a term of sharding; got 'd'"),
        ("a-b d, d -> a-b d", "names of letters and digits.*'a-b'"),
        (", d -> d", "2 names for an array of 2 dimensions in sharding; got 0"),
        ("d, d -> d", "2 names for an array of 2 dimensions in sharding; got 1"),
        ("... a b d, d -> ... d", "2 names for an array of 2 dimensions in sharding; got 3"),
        ("d n, d -> d n", "one size of d in sharding; got 4 and 6"),
        ("n d, d -> d n", "one size of d in sharding; got 6 and 4"),
        ("(d _) _, d -> _ _", "a multiple of the size of d in sharding; got 6 and 4"),
        ("n (d), d -> n d", r"names of letters and digits.*'\(d\)'"),
        ("n (_ d), d -> n d", r"names of letters and digits.*'\(_ d\)'"),
        ("(d _) d, d -> _ d", "each once in a term of sharding; got 'd'"),
    ],
)
def test_wrong_rules(rule, message):
    plain = lambda x, w: x + w[None]
    op = eqxc.Op("wrong", {"cpu": eqxc.PythonKernel(kernel_like_x)}, plain, sharding=rule)
    with pytest.raises(ValueError, match=rf"Op\(wrong\).*{message}"):
        op(normal(4, SIZE), normal(SIZE))


def test_wrong_rules_of_layers():
    class Wrong(Scale):
        sharding = "d -> d"

    with pytest.raises(ValueError, match=r"Layer .*Wrong.*2 operands and 1 results"):
        Wrong(normal(3))(normal(3))
    with pytest.raises(TypeError, match=r"expected sharding to be a rule such as .*, or a function .*; got 3"):
        eqxc.Op("s", {"cpu": eqxc.PythonKernel(product)}, jnp.matmul, sharding=3)  # type: ignore[arg-type]
