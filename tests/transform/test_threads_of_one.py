"""`vmap_method={"weight": "threads"}`: XLA's threads share the examples of one parameter, and the kernel sees the other axes."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import CKernel, JaxKernel, Op, PythonKernel, ops

from ..ops.table import normal


# `x` has as many rows as axes in front make, and `w` is of one row.
FORWARD = """
void scale_rows(long size, long n, const float* x, const float* w, float* out) {
  for (long i = 0; i < size; ++i) out[i] = x[i] * w[i % n];
}
"""
BACKWARD = """
void scale_rows_backward(long size, long n, const float* x, const float* w, const float* dout, float* dx, float* dw) {
  if (dw) for (long i = 0; i < n; ++i) dw[i] = 0;
  for (long i = 0; i < size; ++i) {
    if (dx) dx[i] = dout[i] * w[i % n];
    if (dw) dw[i % n] += dout[i] * x[i];
  }
}
"""
METHODS = ("broadcast_all", "fold", "expand_dims")


def reference(x, w):
    return x * jnp.broadcast_to(w, x.shape)


def scale_rows(method: str = "broadcast_all", *more: Any, **options: Any) -> Op:
    forward = CKernel("scale_rows", source=FORWARD, parameters=("out.size", "w.size", "x", "w", "out"))
    backward = CKernel(
        "scale_rows_backward", source=BACKWARD, parameters=("dout.size", "w.size", "x", "w", "dout", "dx", "dw")
    )
    return Op(
        "scale_rows",
        kernels={"cpu": (forward, *more)},
        reference=reference,
        vmap_method={"x": method, "w": "threads"},
        backward={"cpu": backward},
        **options,
    )


def nests(levels: int) -> list[Any]:
    """Every choice of what each map maps, the outermost first."""
    return list(itertools.product([(0, 0), (0, None), (None, 0)], repeat=levels))


def mapped(function, axes):
    for in_axes in reversed(axes):
        function = jax.vmap(function, in_axes)
    return function


def operands(axes, n=3):
    sizes = range(2, 2 + len(axes))
    fronts = ([size for size, on in zip(sizes, axes, strict=True) if on[i] is not None] for i in range(2))
    return [jnp.asarray(normal(i, (*front, n))) for i, front in enumerate(fronts)]


EVERY = [*nests(1), *nests(2), *nests(3)[::3]]


@pytest.mark.parametrize("axes", EVERY, ids=str)
def test_every_nest_of_maps(axes):
    args = operands(axes)
    for method in METHODS[: 1 if len(axes) > 2 else 3]:
        got = jax.jit(mapped(scale_rows(method), axes))(*args)
        np.testing.assert_array_equal(got, mapped(reference, axes)(*args))


@pytest.mark.parametrize("axes", EVERY, ids=str)
def test_gradients_summed_and_of_each_example(axes):
    args, op = operands(axes), scale_rows()
    loss = lambda f: lambda *args: (f(*args) ** 2).sum()
    for arguments in ((0, 1), 0, 1):
        both = [
            jax.jit(
                lambda *args, f=f, arguments=arguments: (
                    jax.grad(loss(mapped(f, axes)), arguments)(*args),
                    mapped(jax.grad(loss(f), arguments), axes)(*args),
                )
            )(*args)
            for f in (op, reference)
        ]
        jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6), *both)


def of_calls(function, *args) -> list[tuple[int, tuple[str, ...]]]:
    """The number of examples of each call, and the types of the operands of one."""
    return [(call.examples, call.operands) for call in eqxc.inspect(function, *args).calls]


@pytest.mark.parametrize(
    ("axes", "seen"),
    [
        ([(0, None)], (1, ("float32[2,3]", "float32[3]"))),
        ([(None, 0)], (2, ("float32[3]", "float32[3]"))),
        # A batch of examples of an ensemble, in either order: no weight is tiled.
        ([(None, 0), (0, None)], (2, ("float32[3,3]", "float32[3]"))),
        ([(0, None), (None, 0)], (3, ("float32[2,3]", "float32[3]"))),
        ([(0, 0), (0, 0), (0, None)], (6, ("float32[4,3]", "float32[3]"))),
    ],
    ids=str,
)
def test_what_the_kernel_sees(axes, seen):
    assert of_calls(mapped(scale_rows(), axes), *operands(axes)) == [seen]


def test_a_gradient_for_each_example_of_a_shared_operand():
    """Threads share those as well, and each sees one row."""
    x, w = jnp.ones((4, 3)), jnp.arange(3.0)
    loss = lambda x, w: scale_rows()(x, w).sum()
    each = jax.vmap(jax.grad(loss, 1), (0, None))
    np.testing.assert_array_equal(each(x, w), x)
    assert of_calls(each, x, w)[-1] == (4, ("float32[3]",) * 4)


def body(ctx, out, x, w):
    np.multiply(x, w, out=np.asarray(out))


@pytest.mark.parametrize("kind", ["python", "jax"])
@pytest.mark.parametrize("axes", nests(2), ids=str)
def test_other_kernels_are_called_one_after_the_other(kind, axes):
    op = scale_rows("broadcast_all", PythonKernel(body, only_if_chosen=True), JaxKernel(reference)).using(kind)
    args, function = operands(axes), mapped(op, axes)
    for call in (function, jax.jit(function)):
        np.testing.assert_array_equal(call(*args), mapped(reference, axes)(*args))


def test_an_error_of_a_python_kernel_that_was_chosen_is_its_own():
    def wrong(ctx, out, x, w):
        raise KeyError("w")

    op = scale_rows("broadcast_all", PythonKernel(wrong, only_if_chosen=True)).using("python")
    with pytest.raises(eqxc.KernelError, match=r"wrong failed; python lane, .*float32.3., float32.3.. "):
        jax.vmap(op)(jnp.ones((2, 3)), jnp.ones((2, 3)))


def test_several_devices():
    """The examples are divided, and the rows of each."""
    op = scale_rows(sharding="..., ... -> ...")
    x, w = jnp.asarray(normal(0, (4, 6, 3))), jnp.asarray(normal(1, (4, 3)))
    function = jax.vmap(jax.vmap(op, (0, None)))
    mesh = jax.make_mesh((2, 2), ("model", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    of = lambda *names: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*names))
    args = jax.device_put(x, of("model", "data")), jax.device_put(w, of("model"))
    compiled = jax.jit(function).lower(*args).compile()
    np.testing.assert_allclose(compiled(*args), x * w[:, None])
    assert "all-gather" not in (compiled.as_text() or "")


def test_kernels_of_this_package_share_the_threads():
    """They divide their rows among the threads that divide the examples."""
    x, w = jnp.asarray(normal(0, (3, 500, 64))), jnp.asarray(normal(1, (3, 64)))
    norms = lambda norm: jax.vmap(lambda x, w: norm(x, w))
    (call,) = eqxc.inspect(norms(ops.layer_norm), x, w).calls
    assert (call.target, call.examples, call.operands) == (
        "eqxcallback_norm_examples",
        3,
        ("float32[500,64]", "float32[64]"),
    )
    by_reference = lambda x, w: ops.layer_norm(x, w, implementation="reference")
    np.testing.assert_allclose(norms(ops.layer_norm)(x, w), norms(by_reference)(x, w), rtol=1e-5, atol=1e-5)
    with eqxc.debug.checked():
        np.testing.assert_allclose(norms(ops.layer_norm)(x, w), norms(by_reference)(x, w), rtol=1e-5, atol=1e-5)


def test_an_exported_ensemble():
    """Its targets are there when the package is."""
    x, w = jnp.asarray(normal(0, (3, 5, 8))), jnp.asarray(normal(1, (3, 8)))
    program = eqxc.export(jax.jit(jax.vmap(lambda x, w: ops.rms_norm(x, w))))(x, w)
    loaded = eqxc.load(bytes(program.serialize()))
    np.testing.assert_array_equal(loaded.call(x, w), jax.vmap(lambda x, w: ops.rms_norm(x, w))(x, w))
