"""`supports`: kernels that run for some calls only, in order of preference, and what is said of those that do not run."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from .library import SAXPY


X, Y = np.arange(12, dtype=np.float32).reshape(3, 4), np.ones(4, np.float32)


def few(types, *, a):
    assert isinstance(types.x, jax.ShapeDtypeStruct)
    assert types.y is types[1]
    assert types._fields == ("x", "y")
    return (math.prod(types.x.shape) <= 4 and a > 0) or f"there are {types.x.shape} numbers, or a is {a}"


def reference(x, y, *, a):
    return a * x + y


def make(**options):
    options = {"vmap_method": {"x": "broadcast_all", "y": "broadcast_all"}, **options}
    return eqxc.Op("saxpy", {"cpu": eqxc.NativeKernel("Saxpy", SAXPY, supports=few)}, reference, **options)


def kernels(f, *args):
    return jax.jit(f).lower(*args).as_text().count("custom_call @eqxcallback_Saxpy_")


def test_types_decide():
    op = make()
    assert kernels(lambda x, y: op(x, y, a=2.0), X[0], Y) == 1
    assert kernels(lambda x, y: op(x, y, a=2.0), X, X) == 0
    np.testing.assert_array_equal(op(X, X, a=2.0), 3 * X)


def test_options_decide():
    assert kernels(lambda x, y: make()(x, y, a=-2.0), X[0], Y) == 0


@pytest.mark.parametrize("batching", ["fold", {"x": "broadcast_all", "y": "broadcast_all"}], ids=["fold", "each"])
def test_axes_of_vmap_count(batching):
    op = make(vmap_method=batching)
    mapped = jax.vmap(lambda x, y: op(x, y, a=2.0), (0, None))
    assert kernels(mapped, X, Y) == 0
    assert kernels(mapped, X[:1], Y) == 1
    np.testing.assert_array_equal(mapped(X, Y), 2 * X + Y)


def test_each_example_counts_alone():
    """`sequential` calls the kernel for each of them."""
    op = make(vmap_method="sequential")
    assert kernels(jax.vmap(lambda x, y: op(x, y, a=2.0), (0, None)), X, Y) == 1


def test_derivatives_are_those_of_the_reference():
    for x in (X[0], X):
        got = jax.grad(lambda x: make()(x, jnp.ones(x.shape), a=2.0).sum())(x)
        np.testing.assert_array_equal(got, np.full(x.shape, 2.0))


def forward(ctx, out, x):
    np.asarray(out)[...] = np.asarray(x) ** 2


def backward(ctx, grads, args, out, cotangent):
    np.asarray(grads[0])[...] = 2000 * np.asarray(args[0]) * np.asarray(cotangent)


def is_short(types):
    return math.prod(types.x.shape) <= 4 or "x has more than 4 elements"


# Its gradient is wrong by a factor that says where it comes from.
SQUARE = eqxc.Op(
    "square",
    {"cpu": eqxc.PythonKernel(forward, supports=is_short)},
    lambda x: x**2,
    vmap_method="fold",
    backward=eqxc.PythonKernel(backward),
)


def total(x):
    return SQUARE(x).sum()


@pytest.mark.parametrize(
    ("gradient", "factor"),
    [
        (lambda x: jax.grad(total)(x[0]), 1000),
        (lambda x: jax.grad(total)(x.ravel()), 1),
        (lambda x: jax.vmap(jax.grad(total))(x), 1),
        (lambda x: jax.vmap(jax.grad(total))(x[:1]), 1000),
        (lambda x: jax.grad(lambda x: jax.vmap(total)(x).sum())(x), 1),
        (lambda x: jax.vmap(lambda x: jax.grad(lambda x: jax.vmap(total)(x).sum())(x))(x[:, :, None]), 1),
        # The cotangents alone are mapped: the call was one of few.
        (lambda x: jax.jacrev(SQUARE)(x[0]).sum(0), 1000),
        (lambda x: jax.vmap(jax.jacrev(SQUARE))(x).sum(1), 1),
    ],
    ids=["few", "many", "vmap", "vmap of few", "inside", "both", "jacrev", "vmap of jacrev"],
)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_backward_kernel_runs_where_the_forward_one_did(gradient, factor, transform):
    got = transform(gradient)(X)
    want = 2 * X.ravel()[: got.size].reshape(got.shape)
    np.testing.assert_array_equal(got, factor * want)


def test_what_was_chosen_has_to_support_the_call():
    chosen = make().using("native")
    assert kernels(lambda x: chosen(x, x, a=2.0), X[0]) == 1
    with pytest.raises(
        ValueError, match=r'implementation="native" supports; native kernel Saxpy: there are \(3, 4\) numbers'
    ):
        chosen(X, X, a=2.0)
    assert kernels(lambda x: make().using("reference")(x, x, a=2.0), X[0]) == 0


def test_what_was_chosen_has_to_support_the_batch():
    """Each example does, but not all of them at once."""
    mapped = jax.vmap(lambda x: make().using("native")(x, x, a=2.0))
    with pytest.raises(ValueError, match=r"no kernel of the chosen implementation for cpu.*there are \(3, 4\) numbers"):
        jax.jit(mapped).lower(X)


def test_inspect_says_why():
    for f in (SQUARE, jax.grad(total)):
        few, many = (eqxc.inspect(f, x).calls for x in (X[0], X.ravel()))
        assert [(call.lane, call.fallback) for call in few] == [("python", "")] * len(few)
        assert [(call.lane, call.fallback) for call in many] == [
            ("reference", "python kernel forward: x has more than 4 elements")
        ] * len(many)


def named(name, log, **options):
    def kernel(ctx, out, x):
        log.append(name)
        np.asarray(out)[...] = np.asarray(x) ** 2

    kernel.__qualname__ = name
    return eqxc.PythonKernel(kernel, **options)


def test_the_first_that_says_yes_runs():
    log = []
    candidates = (
        named("never", log, supports=lambda types: "it never runs"),
        named("on request", log, only_if_chosen=True),
        named("short", log, supports=is_short),
        named("any", log),
    )
    op = eqxc.Op("square", {"cpu": candidates}, lambda x: x**2, vmap_method="fold")
    for x in (X[0], X):
        np.testing.assert_array_equal(op(x), x**2)
    assert log == ["short", "any"]
    (call,) = eqxc.inspect(op, X).calls
    assert call.lane == "python"
    reasons = [
        ("python kernel never", "it never runs"),
        ("python kernel on request", 'runs only with implementation="python"'),
        ("python kernel short", "x has more than 4 elements"),
    ]
    assert list(call.passed_over) == reasons
    text = str(eqxc.inspect(op, X))
    assert all(f"not the {name}: {reason}" in text for name, reason in reasons)
    op.using("python")(X)
    assert log[-1] == "on request"


def test_the_backward_kernel_is_one_of_several():
    log = []

    def kernel(name):
        def body(ctx, grads, args, out, cotangent):
            log.append(name)
            backward(ctx, grads, args, out, cotangent)

        return body

    several = (eqxc.PythonKernel(kernel("short"), supports=is_short), eqxc.PythonKernel(kernel("any")))
    op = eqxc.Op("square", {"cpu": eqxc.PythonKernel(forward)}, lambda x: x**2, backward={"cpu": several})
    for x in (X[0], X.ravel()):
        jax.grad(lambda x: op(x).sum())(x)
    assert log == ["short", "any"]


def test_absent_arguments_are_none():
    seen = []

    def supports(types, **_):
        seen.append(types)
        return "it is only asked"

    kernel = eqxc.NativeKernel("Saxpy", SAXPY, supports=supports)
    op = eqxc.Op("saxpy", {"cpu": kernel}, lambda x, y=None, z=None: x)
    op(X, None)
    assert (seen[-1].x.shape, seen[-1].y, seen[-1].z) == ((3, 4), None, None)


def test_a_layer_is_the_first_type():
    def supports(types, *, power):
        return f"{type(types.self).__name__}, {types.self.weight.shape}, {types.x.shape}, {power}"

    class Powers(eqxc.Layer):
        weight: jax.Array
        vmap_method = "fold"
        kernels = {"cpu": eqxc.NativeKernel("Saxpy", SAXPY, supports=supports)}  # noqa: RUF012 - a declaration

        def reference(self, x, *, power):
            return self.weight * x**power

    (call,) = eqxc.inspect(lambda x: Powers(jnp.ones(4))(x, power=2), X[0]).calls
    assert call.fallback == "native kernel Saxpy: Powers, (4,), (4,), 2"


@pytest.mark.parametrize("supports", [True, "few"])
def test_wrong_declarations(supports):
    with pytest.raises(TypeError, match="expected supports to be a function"):
        eqxc.NativeKernel("Saxpy", SAXPY, supports=supports)


@pytest.mark.parametrize("answer", [False, None, "", 1])
def test_wrong_answers(answer):
    op = eqxc.Op("saxpy", {"cpu": eqxc.PythonKernel(forward, supports=lambda types: answer)}, lambda x: x**2)
    with pytest.raises(TypeError, match="`supports` of forward: expected True, or the reason why not as a text; got"):
        op(X)
