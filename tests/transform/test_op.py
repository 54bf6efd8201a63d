"""`Op` and its transformations: a user's kernel is what its reference is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback.transform._bind_op import bind_op

from .library import SAXPY


X, Y = np.arange(3, dtype=np.float32) + 1, 10 * np.arange(3, dtype=np.float32) - 4
F32 = jax.ShapeDtypeStruct((3,), jnp.float32)


def native(symbol, **options):
    return {"cpu": eqxc.NativeKernel(symbol, SAXPY, **options)}


def saxpy_reference(x, y, *, a):
    return a * x + y


def make_saxpy(**options):
    return eqxc.Op("saxpy", native("Saxpy"), saxpy_reference, **options)


saxpy = make_saxpy(vmap_method="broadcast_all")


def text(f, *args, platform="cpu"):
    return jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def test_eager_and_jit():
    for f in (saxpy, lambda x, y, a: jax.jit(lambda x, y: saxpy(x, y, a=a))(x, y)):
        got = f(X, Y, a=2.0)
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, 2 * X + Y)
    assert "custom_call @eqxcallback_Saxpy_" in text(lambda x, y: saxpy(x, y, a=2.0), X, Y)


def test_numpy_python_and_jax_arguments():
    op = make_saxpy()
    for x, y in ((1.0, 2.0), (np.float32(1), jnp.float32(2)), (jnp.float32(1), 2.0)):
        got = op(x, y, a=3.0)
        assert got.shape == ()
        assert got == 5


def test_disable_jit():
    with jax.disable_jit():
        np.testing.assert_array_equal(saxpy(X, Y, a=2.0), 2 * X + Y)
        np.testing.assert_array_equal(jax.jit(lambda x: saxpy(x, Y, a=2.0))(X), 2 * X + Y)
        np.testing.assert_array_equal(jax.vmap(lambda x: saxpy(x, Y, a=2.0))(X[None]), (2 * X + Y)[None])


def test_equal_ops_share_programs():
    traces = []

    def reference(x, y, *, a):
        traces.append(1)
        return a * x + y

    op = eqxc.Op("saxpy", native("Saxpy"), reference)
    op(X, Y, a=2.0)
    eqxc.Op("saxpy", native("Saxpy"), reference)(X, Y, a=2.0)
    assert op == eqxc.Op("saxpy", native("Saxpy"), reference)
    assert op != eqxc.Op("saxpy", native("Saxpy"), reference, "broadcast_all")
    assert len(traces) == 1


def test_options_that_are_nan_share_programs():
    op = eqxc.Op("fill", {"cuda": eqxc.PythonKernel(lambda ctx, out, x, value: None)}, lambda x, value: x + value)
    bind_op.cache_clear()
    for _ in range(3):
        assert np.isnan(op(X, value=float("nan"))).all()
    assert bind_op.cache_info().misses == 1


def test_results_follow_x64():
    op = eqxc.Op("positions", {}, lambda x: jnp.arange(x.shape[0]))
    assert op(X).dtype == jnp.int32
    with jax.enable_x64(True):
        assert op(X).dtype == jnp.int64
    assert op(X).dtype == jnp.int32


def test_several_results_and_pytrees():
    op = eqxc.Op(
        "sum_and_difference",
        native("SumAndDifference"),
        lambda pair: {"first": pair["x"] + pair["y"], "second": (pair["x"] - pair["y"], None)},
        "broadcast_all",
    )
    pair = {"x": X, "y": Y, "none": None}
    for f in (op, jax.jit(op)):
        out = f(pair)
        np.testing.assert_array_equal(out["first"], X + Y)
        np.testing.assert_array_equal(out["second"][0], X - Y)
        assert out["second"][1] is None
    out = jax.vmap(op, ({"x": 0, "y": None, "none": None},))({**pair, "x": np.stack([X, 2 * X])})
    np.testing.assert_array_equal(out["second"][0], np.stack([X - Y, 2 * X - Y]))
    gradient = jax.grad(lambda pair: (op(pair)["first"] ** 2 + op(pair)["second"][0]).sum())(pair)
    np.testing.assert_allclose(gradient["y"], 2 * (X + Y) - 1)


def test_no_arguments():
    op = eqxc.Op("seven", {}, lambda: jnp.float32(7))
    assert op() == 7
    assert jax.jit(op)() == 7


def test_out_type_without_a_reference():
    kernels = native("Saxpy", out_type=lambda x, y, *, a: jax.ShapeDtypeStruct(x.shape, x.dtype))
    op = eqxc.Op("saxpy", kernels, vmap_method="sequential")
    np.testing.assert_array_equal(op(X, Y, a=2.0), 2 * X + Y)
    np.testing.assert_array_equal(jax.vmap(lambda x: op(x, Y, a=2.0))(np.stack([X, Y])), np.stack([2 * X + Y, 3 * Y]))
    message = r"Op\(saxpy\): there is no reference, so it has no derivative, and no value .* kernels for cpu\)"
    with pytest.raises(ValueError, match=message):
        jax.grad(lambda x: op(x, Y, a=2.0).sum())(X)
    with pytest.raises(ValueError, match=message):
        text(lambda x: op(x, Y, a=2.0), X, platform="cuda")


@pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu"])
def test_the_reference_is_lowered_where_there_is_no_kernel(platform):
    f = lambda x, y: jax.vmap(lambda x: saxpy(x, y, a=2.0))(x)
    lowered = text(f, np.stack([X, X]), Y, platform=platform)
    assert "custom_call" not in lowered
    assert "stablehlo.multiply" in lowered


def test_platforms_of_one_program():
    """Each has its own lowering: the kernel for one, the reference for the other."""
    f = jax.jit(lambda x, y: saxpy(x, y, a=2.0))
    lowered = f.trace(X, Y).lower(lowering_platforms=("cpu", "cuda")).as_text()
    assert lowered.count("custom_call @eqxcallback_Saxpy_") == 1
    assert "stablehlo.case" in lowered


# Derivatives: those of the reference.


def loss(f):
    return lambda x, y: (f(jnp.sin(x), y, a=2.0) ** 2).sum()


def repeated(f):
    return lambda x, y: jax.lax.scan(lambda c, _: (c + f(c * x, y), None), jnp.float32(0.1), length=3)[0]


DERIVATIVES = {
    "grad": jax.grad,
    "grad of both": lambda f: jax.grad(f, (0, 1)),
    "hessian": jax.hessian,
    "mixed": lambda f: jax.jacfwd(jax.grad(f, 1), 0),
    "jvp": lambda f: lambda x, y: jax.jvp(f, (x, y), (y, x)),
    "jvp of grad": lambda f: lambda x, y: jax.jvp(jax.grad(f), (x, y), (y, x)),
    "linearize": lambda f: lambda x, y: jax.linearize(f, x, y)[1](y, x),
    "vjp": lambda f: lambda x, y: jax.vjp(f, x, y)[1](jnp.ones(())),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "hessian of checkpoint": lambda f: jax.hessian(jax.checkpoint(f), 1),
    "scan": lambda f: jax.grad(repeated(f)),
    "cond": lambda f: jax.grad(lambda x, y: jax.lax.cond(x.sum() > 0, f, lambda x, y: x.sum(), x, y), (0, 1)),
    "map": lambda f: jax.grad(lambda x, y: jax.lax.map(lambda x: f(x, y), jnp.stack([x, y])).sum()),
    "vmap of grad": lambda f: lambda x, y: jax.vmap(jax.grad(f), (None, 0))(x, jnp.stack([y, x])),
    "grad of vmap": lambda f: jax.grad(lambda x, y: jax.vmap(f, (None, 0))(x, jnp.stack([y, x])).sum(), (0, 1)),
    "vmap of vmap of grad": lambda f: (
        lambda x, y: jax.vmap(jax.vmap(jax.grad(f, (0, 1)), (0, None)), (None, 0))(
            jnp.stack([x, y]), jnp.stack([y, y, x])
        )
    ),
    "hessian of vmap": lambda f: jax.hessian(lambda x, y: jax.vmap(f, (0, None))(jnp.stack([x, y]), y).sum(), 1),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives(name):
    transform = DERIVATIVES[name]
    compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    x, y = 0.3 * X, 0.1 * Y
    want = compiled(transform(loss(saxpy_reference)))(x, y)
    results = [compiled(transform(loss(make_saxpy(vmap_method=b))))(x, y) for b in ("sequential", "broadcast_all")]
    if name in ("grad of both", "jvp", "linearize", "vmap of grad"):
        results.append(transform(loss(saxpy))(x, y))  # eager
    for got in results:
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5), got, want)


def test_only_the_value_comes_from_the_kernel():
    """Its derivative is the reference's, whatever the kernel computes."""
    op = eqxc.Op("wrong", native("Saxpy"), lambda x, y, *, a: jnp.sin(x) + y)
    value, gradient = jax.value_and_grad(lambda x: op(x, Y, a=2.0).sum())(X)
    assert value == (2 * X + Y).sum()
    np.testing.assert_allclose(gradient, np.cos(X), rtol=1e-6)


def test_integers_and_float0():
    pick = eqxc.Op("pick", {}, lambda x, n: (x * n.astype(jnp.float32), n + 1))
    n = np.arange(3, dtype=np.int32)
    primals, tangents = jax.jvp(pick, (X, n), (Y, np.zeros(3, jax.dtypes.float0)))
    np.testing.assert_array_equal(primals[1], n + 1)
    np.testing.assert_array_equal(tangents[0], Y * n)
    assert tangents[1].dtype == jax.dtypes.float0
    gradient = jax.grad(lambda x: pick(x, n)[0].sum())(X)
    np.testing.assert_array_equal(gradient, n)
    _, n = jax.grad(lambda x, n: pick(x, n)[0].sum(), (0, 1), allow_int=True)(X, n)
    assert n.dtype == jax.dtypes.float0


# Control flow and devices.


@pytest.mark.parametrize("jit", [False, True])
def test_control_flow(jit):
    def f(x):
        return saxpy(x, Y, a=1.0)

    def outer(x):
        scanned, carries = jax.lax.scan(lambda c, _: (f(c), c), x, length=3)
        looped = jax.lax.while_loop(lambda x: f(x).sum() < 100, f, x)
        chosen = jax.lax.cond(x[0] > 0, f, lambda x: x, x)
        mapped = jax.lax.map(f, jnp.stack([x, x]), batch_size=2)
        return scanned, carries, looped, chosen, mapped

    scanned, carries, looped, chosen, mapped = (jax.jit(outer) if jit else outer)(X)
    np.testing.assert_array_equal(scanned, X + 3 * Y)
    np.testing.assert_array_equal(carries, [X + i * Y for i in range(3)])
    np.testing.assert_array_equal(looped, X + 5 * Y)
    np.testing.assert_array_equal(chosen, X + Y)
    np.testing.assert_array_equal(mapped, [X + Y, X + Y])


@pytest.mark.parametrize("batching", ["sequential", "broadcast_all"])
def test_shard_map(mesh, batching):
    """Each device calls the kernel on its part; what only one of them has varies like the rest."""
    op = make_saxpy(vmap_method=batching)
    x = np.arange(8, dtype=np.float32).reshape(4, 2)

    def local(x, y):
        values = jax.vmap(lambda x: op(x, y, a=2.0))(x)
        return values, jax.grad(lambda y: op(x[0], y, a=2.0).sum() ** 2)(y)[None]

    for check_vma in (True, False):
        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=(jax.P("d"), jax.P()), out_specs=jax.P("d"), check_vma=check_vma
        )
        y = np.array([1.0, -1.0], np.float32)
        values, gradients = jax.jit(mapped)(x, y)
        np.testing.assert_array_equal(values, 2 * x + y[None])
        if check_vma:  # the derivative of what all devices share is their sum
            gradients = gradients[:1]
            want = 2 * np.sum(2 * x + y[None])
            np.testing.assert_allclose(gradients, np.full((1, 2), want), rtol=1e-6)
    with pytest.raises(ValueError, match="out_specs"):  # the results differ between devices
        jax.jit(jax.shard_map(lambda x: op(x, x, a=1.0), mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P()))(x)


def test_under_an_explicit_mesh():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(saxpy(X, Y, a=2.0), 2 * X + Y)
        np.testing.assert_array_equal(jax.jit(lambda x: saxpy(x, x, a=2.0))(X), 3 * X)


def test_sharded_operands_of_a_jit(mesh):
    """The compiler knows nothing of the kernel: it sees all of the operands, on each device."""
    x = jax.device_put(np.arange(8, dtype=np.float32), jax.NamedSharding(mesh, jax.P("d")))
    np.testing.assert_array_equal(jax.jit(lambda x: saxpy(x, x, a=2.0))(x), 3 * np.arange(8))


@pytest.mark.parametrize("constant", [np.float32(2), np.ones(3, np.float32)], ids=["number", "array"])
@pytest.mark.parametrize("derivative", [jax.jacrev, jax.jacfwd])
def test_constants_are_arrays_for_a_reference(constant, derivative):
    """As they are for any function in JAX. Rules of JAX are given NumPy's arrays, which have no `at`."""
    op = eqxc.Op(
        "scale",
        {"cpu": eqxc.PythonKernel(lambda ctx, out, x, by: out.write(np.asarray(x) * np.asarray(by)))},
        lambda x, by: x * jnp.broadcast_to(by.at[...].multiply(1), x.shape),
    )
    got = jax.jit(derivative(lambda x: op(x, constant)))(jnp.ones(3))
    np.testing.assert_array_equal(got, np.diag(np.broadcast_to(constant, 3)))


def three(x):
    y = x.astype(jnp.float32)
    return 1e3 * y, -1001.953125 * y, y


def three_kernel(ctx, out, x):
    for result, value in zip(out, (1e3, -1001.953125, 1), strict=True):
        result.write(np.asarray(x).astype(np.float32) * np.float32(value))


@pytest.mark.parametrize("lane", ["python", "jax"])
def test_several_results_are_differentiated_together(lane):
    """By one call of the reference, or of what the platform has in its place: gradients of a call each would be rounded to 16
    bits before they are added."""
    calls = []

    def counted(name, factor):
        def function(x):
            calls.append(name)
            return tuple(factor * y for y in three(x))

        return function

    # The platform's own function is told from the reference by its derivatives.
    kernel, factor = eqxc.PythonKernel(three_kernel), 1
    if lane == "jax":
        kernel, factor = eqxc.JaxKernel(three, differentiable=counted("differentiable", 2)), 2
    op = eqxc.Op("three", {"cpu": kernel}, counted("reference", 1), vmap_method="fold")
    x = jnp.ones(2, jnp.bfloat16)
    gradient = jax.grad(lambda x: sum(map(jnp.sum, op(x))))
    np.testing.assert_array_equal(gradient(x), [-0.953125 * factor] * 2)
    for function in (gradient, lambda x: jax.jvp(op, (x,), (x,))):
        calls.clear()
        jax.make_jaxpr(function)(x)
        assert sorted(calls) == (["reference"] if lane == "python" else ["differentiable", "reference"])
