"""Gradients of ops as kernels, in both lanes: what they are given, and where they run."""

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from ..layer.layers import NATIVE, NativeWave, assert_close, build_native, compiled, values


@pytest.fixture(scope="module", autouse=True)
def native_library():
    build_native()


calls: list[Any] = []


@pytest.fixture(autouse=True)
def no_calls():
    calls.clear()


def reference(w, x, *, power):
    return jnp.sin(x) * w**power


def forward_body(ctx, out, w, x, *, power):
    calls.append("forward")
    np.asarray(out)[...] = np.sin(np.asarray(x)) * np.asarray(w) ** power


def backward_body(ctx, grads, args, out, cotangents, *, power):
    calls.append(tuple(None if gradient is None else gradient.shape for gradient in grads))
    dw, dx = grads
    assert out.ndim <= cotangents.ndim  # those of a sum have no less than it
    w, x, cotangent = np.asarray(args[0]), np.asarray(args[1]), np.asarray(cotangents)
    if dw is not None:
        dw.write(cotangent * np.sin(x) * power * w ** (power - 1))
    if dx is not None:
        dx.write(cotangent * np.cos(x) * w**power)


PYTHON = eqxc.PythonKernel(forward_body)
PYTHON_BACKWARD = eqxc.PythonKernel(backward_body)
NATIVE_KERNEL = eqxc.NativeKernel("Wave", NATIVE)
NATIVE_BACKWARD = eqxc.NativeKernel("WaveBackward", NATIVE)

# Forward and backward need not be of one lane.
LANES = {
    "python": (PYTHON, PYTHON_BACKWARD),
    "native": (NATIVE_KERNEL, NATIVE_BACKWARD),
    "python backward": (NATIVE_KERNEL, {"cpu": PYTHON_BACKWARD}),
    "native backward": (PYTHON, NATIVE_BACKWARD),
    # Which do not read the results.
    "python alone": (PYTHON, PYTHON_BACKWARD),
    "native alone": (NATIVE_KERNEL, NATIVE_BACKWARD),
}
ALL = ("python", "native", "python alone", "native alone")


def make(lane, batching: Any = "fold", **options):
    forward, backward = LANES[lane]
    options = {"backward_reads_results": "alone" not in lane, **options}
    return eqxc.Op("wave", {"cpu": forward}, reference, batching, backward=backward, **options)


W, X = values(3), values(3) + np.float32(0.2)


def of(f, power=3):
    return lambda w, x: f(w, x, power=power)


def loss(f):
    return lambda w, x: (of(f)(w, x) ** 2).sum()


TRANSFORMS: dict[str, Any] = {
    "grad": lambda f: jax.grad(loss(f), (0, 1)),
    "partial": lambda f: lambda w, x: (jax.grad(loss(f), 0)(w, x), jax.grad(loss(f), 1)(w, x)),
    "of a sum": lambda f: jax.grad(lambda w, x: of(f)(w, x).sum(), (0, 1)),
    "vjp": lambda f: lambda w, x: jax.vjp(of(f), w, x)[1](x),
    "jacrev": lambda f: jax.jacrev(of(f), (0, 1)),
    "jvp": lambda f: lambda w, x: jax.jvp(of(f), (w, x), (x, w)),
    "hessian": lambda f: jax.hessian(loss(f), (0, 1)),
    "reverse over reverse": lambda f: jax.jacrev(jax.grad(loss(f), (0, 1)), (0, 1)),
    "third order": lambda f: jax.jacfwd(jax.hessian(loss(f), (0, 1)), (0, 1)),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(loss(f)), (0, 1)),
    "scan": lambda f: jax.grad(
        lambda w, x: (jax.lax.scan(lambda c, _: (of(f)(w, c), c), x, length=3)[0] ** 2).sum(), (0, 1)
    ),
    "grad of vmap": lambda f: jax.grad(
        lambda w, x: jax.vmap(loss(f), (None, 0))(w, jnp.stack([x, w, x + 1])).sum(), (0, 1)
    ),
    "vmap of grad": lambda f: lambda w, x: jax.vmap(jax.grad(loss(f), (0, 1)), (None, 0))(w, jnp.stack([x, w])),
    "vmap of grad of a sum": lambda f: (
        lambda w, x: jax.vmap(jax.grad(lambda w, x: of(f)(w, x).sum(), (0, 1)), (None, 0))(w, jnp.stack([x, w]))
    ),
    "vmap of grad of vmap": lambda f: (
        lambda w, x: jax.vmap(jax.grad(lambda w, x: jax.vmap(loss(f), (None, 0))(w, x).sum(), (0, 1)), (None, 0))(
            w, jnp.stack([jnp.stack([x, w]), jnp.stack([w, x]), jnp.stack([x, x])])
        )
    ),
    "grad of nested vmap": lambda f: jax.grad(
        lambda w, x: jax.vmap(jax.vmap(loss(f), (0, None)), (None, 0))(jnp.stack([w, x]), jnp.stack([x, w, x])).sum(),
        (0, 1),
    ),
    "ensemble": lambda f: lambda w, x: jax.vmap(jax.grad(loss(f), (0, 1)), (0, None))(jnp.stack([x, w]), x),
}


CASES = [(name, lane) for name in TRANSFORMS for lane in LANES if lane in ALL or name in ("grad", "hessian")]


@pytest.mark.parametrize(("name", "lane"), CASES)
def test_derivatives(name, lane):
    transform = TRANSFORMS[name]
    got = compiled(transform(make(lane)), W, X)
    assert_close(got, compiled(transform(reference), W, X), 1e-4)
    in_python = [call for call in calls if call != "forward"]
    assert bool(in_python) == ("python" in lane and name != "jvp")


@pytest.mark.parametrize("lane", ["python", "native"])
def test_eager_derivatives(lane):
    for name in ("grad", "vmap of grad", "jvp"):
        got = TRANSFORMS[name](make(lane))(jnp.asarray(W), jnp.asarray(X))
        assert_close(got, TRANSFORMS[name](reference)(jnp.asarray(W), jnp.asarray(X)), 1e-4)


BATCHINGS: list[Any] = [
    *("sequential", "sequential_unrolled", "expand_dims", "broadcast_all"),
    {"x": "broadcast_all", "w": "fold"},
    {"x": "broadcast_all", "w": "sequential"},
    {"x": "fold", "w": "broadcast_all"},
    {},
    "reference",
    {"x": "broadcast_all", "w": "reference"},
]


@pytest.mark.parametrize("batching", BATCHINGS, ids=str)
@pytest.mark.parametrize(
    "name", ["grad of vmap", "vmap of grad of a sum", "vmap of grad of vmap", "grad of nested vmap"]
)
def test_batching(name, batching):
    transform, want = TRANSFORMS[name], compiled(TRANSFORMS[name](reference), W, X)
    # The native one knows no other axes than those in front.
    for lane in ALL if batching not in ("expand_dims", {"x": "fold", "w": "broadcast_all"}) else ALL[::2]:
        assert_close(compiled(transform(make(lane, batching)), W, X), want, 1e-4)


@pytest.mark.parametrize("batching", ["reference", "sequential", "broadcast_all"])
@pytest.mark.parametrize("lane", ALL)
def test_a_map_of_cotangents_alone(lane, batching):
    """The kernel ran forward, for no operand is mapped."""
    _, pullback = jax.vjp(of(make(lane, batching)), jnp.asarray(W), jnp.asarray(X))
    _, want = jax.vjp(of(reference), jnp.asarray(W), jnp.asarray(X))
    cotangents = jnp.stack([X, W, X + W])
    assert_close(jax.vmap(pullback)(cotangents), jax.vmap(want)(cotangents), 1e-4)


@pytest.mark.parametrize("lane", ALL)
def test_what_the_gradient_alone_runs(lane):
    """Results that it does not read are not computed for it, and not kept: they are in no program that needs none."""
    gradient = jax.jit(lambda w, x: jax.vjp(of(make(lane)), w, x)[1](x))
    text = gradient.lower(W, X).compile().as_text() or ""
    assert (text.count("custom-call(") == 2) == ("alone" not in lane)
    assert_close(gradient(W, X), jax.vjp(of(reference), W, X)[1](X), 1e-4)
    _, pullback = jax.vjp(of(make(lane)), jnp.asarray(W), jnp.asarray(X))
    assert len(jax.tree.leaves(pullback)) == (2 if "alone" in lane else 3)


def test_a_function_says_whether_results_are_read():
    op = make("python", backward_reads_results=lambda w, x, *, power: power == 3 and x.shape == (3,))
    for power, kept in ((3, 3), (2, 2)):
        _, pullback = jax.vjp(of(op, power), jnp.asarray(W), jnp.asarray(X))
        assert len(jax.tree.leaves(pullback)) == kept
        assert_close(pullback(jnp.asarray(X)), jax.vjp(of(reference, power), W, X)[1](X), 1e-4)
    wrong = make("python", backward_reads_results=lambda w, x: True)
    with pytest.raises(TypeError, match=r"Op\(wave\): .*'power'"):
        of(wrong)(W, X)


def test_what_is_asked_for():
    """A Python kernel is asked for the gradients that are wanted. A native one, with all results in its signature, gives all."""
    op = make("python")
    jax.grad(loss(op), 0)(W, X)
    jax.grad(loss(op), 1)(W, X)
    jax.grad(loss(op), (0, 1))(W, X)
    assert [call for call in calls if call != "forward"] == [((3,), None), (None, (3,)), ((3,), (3,))]
    calls.clear()
    xs = np.stack([X, W])
    jax.grad(lambda w, x: jax.vmap(loss(op), (None, 0))(w, x).sum(), (0, 1))(W, xs)
    jax.vmap(jax.grad(loss(op), (0, 1)), (None, 0))(W, xs)
    assert [call for call in calls if call != "forward"] == [((3,), (2, 3)), ((2, 3), (2, 3))]
    text = jax.jit(jax.grad(loss(make("native")))).lower(W, X).as_text()
    (line,) = [line for line in text.splitlines() if "custom_call @eqxcallback_WaveBackward_" in line]
    assert line.rstrip().endswith("-> (tensor<3xf32>, tensor<3xf32>)")


def test_backward_runs_in_reverse_mode_alone():
    op = make("python")
    jax.jvp(of(op), (W, X), (X, W))
    jax.jacfwd(of(op))(W, X)
    jax.linearize(of(op), W, X)[1](X, W)
    assert set(calls) == {"forward"}


def test_backward_without_a_reference():
    def out_type(w, x, *, power):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    for forward, backward in (LANES["python"], LANES["native"]):
        kernel: Any
        if isinstance(forward, eqxc.PythonKernel):
            kernel = eqxc.PythonKernel(forward_body, out_type=out_type)
        else:
            kernel = eqxc.NativeKernel("Wave", NATIVE, out_type=out_type)
        op = eqxc.Op("wave", {"cpu": kernel}, vmap_method="fold", backward=backward)
        for name in ("grad", "vmap of grad", "scan", "checkpoint", "jacrev", "of a sum"):
            assert_close(compiled(TRANSFORMS[name](op), W, X), compiled(TRANSFORMS[name](reference), W, X), 1e-4)
        for name in ("jvp", "hessian", "reverse over reverse"):
            with pytest.raises(ValueError, match=r"Op\(wave\): .*reference"):
                compiled(TRANSFORMS[name](op), W, X)


def test_where_there_is_no_kernel_the_reference_is_differentiated():
    f = jax.jit(jax.grad(loss(make("native"))))
    text = f.trace(W, X).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call" not in text
    assert "stablehlo.cosine" in text or "stablehlo.sine" in text


def several_reference(tree, n, *, scale):
    return {"y": tree["x"] * tree["w"] * scale, "n": n + 1}, tree["x"] ** 2


def several_body(ctx, out, tree, n, *, scale):
    named, square = out
    np.asarray(named["y"])[...] = np.asarray(tree["x"]) * np.asarray(tree["w"]) * np.float32(scale)
    np.asarray(named["n"])[...] = np.asarray(n) + 1
    np.asarray(square)[...] = np.asarray(tree["x"]) ** 2


def several_backward(ctx, grads, args, out, cotangents, *, scale):
    (d_tree, dn), (tree, n) = grads, args
    assert dn is None
    assert n.dtype == cotangents[0]["n"].dtype == out[0]["n"].dtype == np.int32
    assert not np.asarray(cotangents[0]["n"]).any()
    dy, d_square = np.asarray(cotangents[0]["y"]), np.asarray(cotangents[1])
    x, w = np.asarray(tree["x"]), np.asarray(tree["w"])
    if d_tree["x"] is not None:
        d_tree["x"].write(dy * w * np.float32(scale) + 2 * d_square * x)
    if d_tree["w"] is not None:
        d_tree["w"].write(dy * x * np.float32(scale))


@pytest.mark.parametrize("batching", ["fold", "sequential", "broadcast_all", {"tree": "fold"}], ids=str)
def test_trees_and_integers(batching):
    op = eqxc.Op(
        "several",
        {"cpu": eqxc.PythonKernel(several_body)},
        several_reference,
        batching,
        backward=eqxc.PythonKernel(several_backward),
    )
    n = np.arange(3, dtype=np.int32)

    def results(f):
        def total(x, w):
            named, square = f({"x": x, "w": w}, n, scale=2.0)
            return (named["y"] ** 2).sum() + square.sum()

        def of_one(x, w):
            return f({"x": x, "w": w}, n, scale=2.0)[1].sum()

        return compiled(lambda x, w: gradients(total, of_one, x, w), X, W)

    def gradients(total, of_one, x, w):
        return (
            jax.grad(total, (0, 1))(x, w),
            jax.grad(total, 1)(x, w),
            jax.grad(of_one, (0, 1))(x, w),
            jax.grad(lambda x, w: jax.vmap(total, (0, None))(x, w).sum(), (0, 1))(jnp.stack([x, w]), w),
            jax.vmap(jax.grad(total, (0, 1)), (0, None))(jnp.stack([x, w]), w),
            jax.hessian(total)(x, w),
        )

    assert_close(results(op), results(several_reference), 1e-4)
    _, dn = jax.grad(lambda t, n: op(t, n, scale=1.0)[1].sum(), (0, 1), allow_int=True)({"x": X, "w": W}, n)
    assert dn.dtype == jax.dtypes.float0


def test_a_wrong_backward_is_seen():
    """It really is what the kernel computes: nothing else does."""

    def wrong(ctx, grads, args, out, cotangents, *, power):
        for gradient in grads:
            if gradient is not None:
                np.asarray(gradient)[...] = 7

    op = eqxc.Op("wave", {"cpu": PYTHON}, reference, backward=eqxc.PythonKernel(wrong))
    np.testing.assert_array_equal(jax.grad(loss(op))(W, X), [7, 7, 7])
    np.testing.assert_allclose(jax.jvp(of(op), (W, X), (W, X))[1], jax.jvp(of(reference), (W, X), (W, X))[1], rtol=1e-5)


def test_a_failing_backward():
    def broken(ctx, grads, args, out, cotangents, *, power):
        raise KeyError("backward is broken")

    op = eqxc.Op("wave", {"cpu": PYTHON}, reference, backward=eqxc.PythonKernel(broken))
    with pytest.raises(eqxc.KernelError, match="backward is broken"):
        jax.grad(loss(op))(W, X)
    with pytest.raises(eqxc.KernelError, match="backward is broken"), eqxc.raising():
        jax.block_until_ready(jax.jit(jax.grad(loss(op)))(W, X))


def test_options_select_attributes_of_backward():
    """A native backward takes the attributes that it names."""
    op = eqxc.Op(
        "wave",
        {"cpu": eqxc.NativeKernel("Wave", NATIVE, attributes=("power",))},
        lambda w, x, *, power, unused: reference(w, x, power=power),
        backward=eqxc.NativeKernel("WaveBackward", NATIVE, attributes=("power",)),
    )
    f = functools.partial(op, unused="not for the kernels")
    assert_close(
        jax.grad(loss(f), (0, 1))(W, X), jax.grad(loss(reference), (0, 1))(jnp.asarray(W), jnp.asarray(X)), 1e-4
    )


@pytest.mark.parametrize("needs_grad", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("of_layer", [False, True], ids=["op", "layer"])
def test_a_native_kernel_may_know_which_gradients_are_needed(of_layer, needs_grad):
    """Its results are these gradients alone."""
    kernel = eqxc.NativeKernel("WaveBackwardNeeded", NATIVE, attributes=("power", "needs_grad"))
    f: Any = eqxc.Op("wave", {"cpu": NATIVE_KERNEL}, reference, backward=kernel)
    if of_layer:

        class Asking(NativeWave):
            backward_kernels: ClassVar[Any] = {"cpu": kernel}

        f = lambda w, x, *, power: Asking(w, power)(x)
    gradient = jax.grad(loss(f), needs_grad)
    want = jax.grad(loss(reference), needs_grad)(jnp.asarray(W), jnp.asarray(X))
    for transformed in (gradient, jax.jit(gradient)):
        assert_close(transformed(W, X), want, 1e-4)
    (call,) = [line for line in jax.jit(gradient).lower(W, X).as_text().splitlines() if "WaveBackwardNeeded" in line]
    assert f"needs_grad = {sum(1 << i for i in needs_grad)} :" in call
