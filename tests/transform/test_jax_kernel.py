"""JAX functions in the place of kernels: calls without rules of their own get those of the op."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import eqxcallback as eqxc

from .library import SAXPY


X, Y = np.arange(3, dtype=np.float32) + 1, 10 * np.arange(3, dtype=np.float32)
SAME = "jax_kernel_saxpy"


@pytest.fixture(scope="module", autouse=True)
def handler(saxpy_library):
    jax.ffi.register_ffi_target(SAME, jax.ffi.pycapsule(ctypes.CDLL(str(SAXPY)).Saxpy), platform="cpu")


def by_ffi(x, y, *, a):
    """Has no derivative, and under `vmap` an error of JAX's."""
    x, y = jnp.broadcast_arrays(x, y)
    return jax.ffi.ffi_call(SAME, jax.ShapeDtypeStruct(x.shape, x.dtype))(x, y, a=np.float64(a))


def by_pallas(x, y, *, a):
    def body(x, y, out):
        out[...] = a * x[...] + y[...]

    x, y = jnp.broadcast_arrays(x, y)
    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x, y)


def gradients(args, out, cotangent, *, a):
    return a * cotangent, cotangent


def saxpy(function=by_ffi, **options):
    options = {"vmap_method": "broadcast_all", **options}
    return eqxc.Op("saxpy", {"cpu": eqxc.JaxKernel(function)}, lambda x, y, *, a: a * x + y, **options)


def lanes(function, *args, **options):
    return [(call.op, call.kind, call.lane) for call in eqxc.inspect(function, *args, **options).calls]


@pytest.mark.parametrize(
    ("function", "vmap_method", "backward"),
    [
        *((by_ffi, method, gradients) for method in ("broadcast_all", "expand_dims", "sequential", {"x": "fold"})),
        (by_ffi, "broadcast_all", None),
        (by_pallas, "broadcast_all", gradients),
        (by_pallas, "sequential", None),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_check(function, vmap_method, backward):
    fields = {} if backward is None else {"backward": {"cpu": eqxc.JaxKernel(backward)}}
    report = eqxc.testing.check(
        saxpy(function, vmap_method=vmap_method, **fields), X, Y, a=2.0, skip=("dtypes", "export")
    )
    assert report.passed, report


def test_it_is_what_runs():
    """Not the reference, which is another function here."""
    op = eqxc.Op(
        "double",
        {"cpu": eqxc.JaxKernel(lambda x: 2 * x)},
        lambda x: 3 * x,
        backward={"cpu": eqxc.JaxKernel(lambda args, out, cotangent: (5 * cotangent,))},
        vmap_method="fold",
    )
    assert op(jnp.float32(1)) == jax.jit(op)(jnp.float32(1)) == 2
    assert op.using("jax")(1.0) == 2
    assert op.using("reference")(1.0) == 3
    assert jax.grad(op)(1.0) == jax.jit(jax.grad(op))(1.0) == 5
    np.testing.assert_array_equal(jax.vmap(jax.grad(op))(X), [5, 5, 5])
    assert jax.jvp(op, (1.0,), (1.0,)) == (2, 3)
    assert lanes(op, X) == [("double", "forward", "jax")]
    assert lanes(op, X, platform="tpu") == [("double", "forward", "reference")]


def test_its_own_calls_are_rows():
    mapped = jax.vmap(lambda x: saxpy()(x, Y, a=2.0))
    x = np.ones((5, 3), np.float32)
    outer, inner = eqxc.inspect(mapped, x).calls
    assert (outer.lane, outer.target, outer.handle, outer.operands) == ("jax", None, None, ("float32[5,3]",) * 2)
    assert (inner.lane, inner.target, inner.times) == ("ffi", SAME, 1)
    assert inner.path.startswith(outer.path)

    def three_times(x):
        return jax.lax.fori_loop(0, 3, lambda _, x: mapped(x), x)

    assert [call.times for call in eqxc.inspect(three_times, x).calls] == [3, 3]


def test_a_gradient_that_is_not_needed_is_not_computed():
    """None stands for it as well, also for a whole argument."""

    def backward(args, out, cotangent):
        return (cotangent * 2, None), jnp.sin(cotangent)

    op = eqxc.Op(
        "twice",
        {"cpu": eqxc.JaxKernel(lambda pair, y: 2 * pair[0] + 0 * y)},
        lambda pair, y: 2 * pair[0] + 0 * y,
        backward={"cpu": eqxc.JaxKernel(backward)},
        vmap_method="fold",
    )
    of_x = jax.grad(lambda x: op((x, 1), Y).sum())
    np.testing.assert_array_equal(of_x(X), [2, 2, 2])
    assert "sine" not in (jax.jit(of_x).lower(X).compile().as_text() or "")
    with pytest.raises(TypeError, match=r"Op\(twice\): .*backward: expected gradients of types .*float32\[3\].*None"):
        jax.grad(lambda x: op((x, x), Y).sum())(X)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda x: x[:2], r"expected results of types \(float32\[3\]\); got \(float32\[2\]\)"),
        (lambda x: x.astype(jnp.bfloat16), r"got \(bfloat16\[3\]\)"),
        (lambda x: (x, x), r"got \(float32\[3\], float32\[3\]\)"),
        (lambda x: None, r"got \(\)"),
    ],
)
def test_wrong_results(function, text):
    with pytest.raises(TypeError, match=rf"Op\(wrong\): .*<lambda>: .*{text}"):
        eqxc.Op("wrong", {"cpu": eqxc.JaxKernel(function)}, lambda x: x)(X)


def test_wrong_gradients():
    op = saxpy(backward={"cpu": eqxc.JaxKernel(lambda args, out, cotangent, *, a: {"x": cotangent})})
    with pytest.raises(TypeError, match=r"expected gradients in the tree of the arguments"):
        jax.grad(lambda x: op(x, Y, a=1.0).sum())(X)
    op = saxpy(backward={"cpu": eqxc.JaxKernel(lambda args, out, cotangent, *, a: (cotangent[:1], cotangent))})
    with pytest.raises(TypeError, match=r"expected gradients of types \(float32\[3\]\).* got \(float32\[1\]\)"):
        jax.grad(lambda x: op(x, Y, a=1.0).sum())(X)


@pytest.mark.wrong_types
def test_what_is_no_function():
    with pytest.raises(TypeError, match="JaxKernel: expected a function of JAX arrays; got 3 of type int"):
        eqxc.JaxKernel(3)  # type: ignore[arg-type]


def test_it_is_passed_over_where_it_does_not_support_the_call():
    small = eqxc.JaxKernel(lambda x: 2 * x, supports=lambda types: types.x.size < 4 or "x is long")
    op = eqxc.Op("double", {"cpu": (small, eqxc.JaxKernel(lambda x: x + x))}, lambda x: 2 * x)
    (call,) = eqxc.inspect(op, np.ones(5, np.float32)).calls
    assert call.lane == "jax"
    assert [reason for _, reason in call.passed_over] == ["x is long"]


def test_on_several_devices():
    """It is traced for the part that each device has."""
    shapes = []

    def kernel(x, y, *, a):
        shapes.append(x.shape)
        return by_ffi(x, y, a=a)

    op = saxpy(kernel, sharding="i, i -> i")
    mesh = jax.make_mesh((4,), ("i",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(np.arange(8, dtype=np.float32), jax.NamedSharding(mesh, jax.P("i")))
    out = jax.jit(lambda x: op(x, x, a=2.0))(x)
    np.testing.assert_array_equal(out, 3 * np.arange(8))
    assert (2,) in shapes
    assert out.sharding.is_equivalent_to(x.sharding, 1)


def test_a_saved_program_has_it():
    exported = jax.export.export(jax.jit(lambda x: saxpy(by_pallas)(x, x, a=2.0)), platforms=["cpu", "tpu"])(
        jax.ShapeDtypeStruct((3,), jnp.float32)
    )
    loaded = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(loaded.call(X), 3 * X)
