"""Ops whose kernels are in Python: what bodies are given, and that they are under every transformation what references are."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc


X, Y = np.arange(3, dtype=np.float32) + 1, 10 * np.arange(3, dtype=np.float32) - 4

calls: list[Any] = []


@pytest.fixture(autouse=True)
def no_calls():
    calls.clear()


def saxpy_body(ctx, out, x, y, *, a):
    calls.append((x.shape, y.shape, out.shape))
    np.asarray(out)[...] = np.float32(a) * np.asarray(x) + np.asarray(y)


def saxpy_reference(x, y, *, a):
    return a * x + y


def make(**options):
    return eqxc.Op("saxpy", {"cpu": eqxc.PythonKernel(saxpy_body)}, saxpy_reference, **options)


def test_eager_and_jit():
    op = make()
    for f in (functools.partial(op, a=2.0), jax.jit(lambda x, y: op(x, y, a=2.0))):
        np.testing.assert_array_equal(f(X, Y), 2 * X + Y)
    assert len(calls) == 2
    text = jax.jit(lambda x: op(x, x, a=2.0)).trace(X).lower(lowering_platforms=("tpu",)).as_text()
    assert "custom_call" not in text


def test_options_that_are_equal_but_not_the_same():
    def body(ctx, out, x, *, value):
        np.asarray(out)[...] = {"int": 1, "bool": 2, "float": 3}[type(value).__name__] * np.copysign(1, value)

    op = eqxc.Op(
        "kind", {"cpu": eqxc.PythonKernel(body, out_type=lambda x, *, value: jax.ShapeDtypeStruct((), x.dtype))}
    )
    options, want = [1, True, 1.0, 0.0, -0.0, False, 0], [1, 2, 3, 3, -3, 2, 1]
    assert [float(op(X, value=value)) for value in options] == want
    assert [float(y) for y in jax.jit(lambda x: [op(x, value=value) for value in options])(X)] == want


class Pair(NamedTuple):
    first: Any
    second: Any


def tree_body(ctx, out, pair, tree, *, names):
    assert type(pair) is Pair
    assert (tree["none"], names, out["none"]) == (None, ("a", "b"), None)
    np.multiply(pair.first, tree["k"][0], out=np.asarray(out["pair"].first))
    np.add(pair.second, tree["k"][1], out=np.asarray(out["pair"].second))


def tree_reference(pair, tree, *, names):
    return {"pair": Pair(pair.first * tree["k"][0], pair.second + tree["k"][1]), "none": None}


def test_trees():
    op = eqxc.Op("trees", {"cpu": eqxc.PythonKernel(tree_body)}, tree_reference, "fold")
    args, names = (Pair(X, Y), {"k": [Y, X], "none": None}), ("a", "b")
    for f in (op, lambda *args, names: jax.jit(lambda *args: op(*args, names=names))(*args)):
        out = f(*args, names=names)
        np.testing.assert_array_equal(out["pair"].first, X * Y)
        np.testing.assert_array_equal(out["pair"].second, X + Y)
    axes = (Pair(0, None), {"k": [None, 0], "none": None})
    mapped = (Pair(np.stack([X, Y]), Y), {"k": [Y, np.stack([X, Y])], "none": None})
    got, want = (jax.vmap(lambda *args: f(*args, names=names), axes)(*mapped) for f in (op, tree_reference))  # noqa: B023
    jax.tree.map(np.testing.assert_array_equal, got, want)
    loss = lambda f: lambda *args: sum((leaf**2).sum() for leaf in jax.tree.leaves(f(*args, names=names)))
    got, want = (jax.grad(loss(f), (0, 1))(*args) for f in (op, tree_reference))
    jax.tree.map(np.testing.assert_allclose, got, want)


@pytest.mark.parametrize(
    ("batching", "x", "y"),
    [
        ("fold", (6, 3), (3,)),
        ("broadcast_all", (2, 3, 3), (2, 3, 3)),
        ("expand_dims", (2, 3, 3), (1, 1, 3)),
        ("sequential", (3,), (3,)),
        ("sequential_unrolled", (3,), (3,)),
        ({"x": "broadcast_all", "y": "fold"}, (2, 3, 3), (3,)),
        ({"x": "broadcast_all", "y": "sequential"}, (2, 3, 3), (3,)),
        ({"x": "broadcast_all", "y": "broadcast_all"}, (2, 3, 3), (2, 3, 3)),
        ({"x": "sequential"}, (3,), (3,)),
    ],
    ids=str,
)
def test_what_the_body_sees_in_nested_vmaps(batching, x, y):
    op = make(vmap_method=batching)
    xs = np.arange(18, dtype=np.float32).reshape(2, 3, 3)
    got = jax.vmap(jax.vmap(lambda x: op(x, Y, a=2.0)))(xs)
    np.testing.assert_array_equal(got, 2 * xs + Y)
    assert set(calls) <= {(x, y, x), (x, y, (3,))}
    assert len(calls) in (1, 6)


@pytest.mark.parametrize(
    "batching", ["fold", "sequential", "expand_dims", {"x": "broadcast_all", "y": "sequential"}], ids=str
)
@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
def test_derivatives_are_the_references(batching, axes):
    op = make(vmap_method=batching)
    x, y = (np.stack([v, v + 1]) if axis == 0 else v for v, axis in zip((X, Y), axes, strict=True))

    def results(f):
        loss = lambda x, y: (f(x, y, a=3.0) ** 2).sum()
        mapped = lambda x, y: jax.vmap(loss, axes)(x, y).sum()
        return jax.jit(
            lambda x, y: (
                jax.grad(mapped, (0, 1))(x, y),
                jax.vmap(jax.grad(loss, (0, 1)), axes)(x, y),
                jax.vmap(jax.hessian(loss), axes)(x, y),
                jax.jvp(mapped, (x, y), (x, y)),
            )
        )(x, y)

    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5), results(op), results(saxpy_reference))


@pytest.mark.parametrize("aliases", [{"y": 0}, {1: 0}])
def test_in_place(aliases):
    def body(ctx, out, x, y, *, a):
        np.asarray(out)[...] += np.float32(a) * np.asarray(x)

    for batching in ("fold", "sequential", "expand_dims", "broadcast_all", {"x": "fold"}):
        op = eqxc.Op("saxpy", {"cpu": eqxc.PythonKernel(body, aliases=aliases)}, saxpy_reference, batching)
        y = jnp.asarray(Y)
        np.testing.assert_array_equal(op(X, y, a=2.0), 2 * X + Y)
        np.testing.assert_array_equal(y, Y)
        xs = np.stack([X, Y])
        np.testing.assert_array_equal(jax.vmap(functools.partial(op, a=2.0), (0, None))(xs, y), 2 * xs + Y)
        np.testing.assert_array_equal(y, Y)
        given = jnp.asarray(Y) + 0
        pointer = given.unsafe_buffer_pointer()
        got = jax.jit(lambda x, y, op=op: op(x, y, a=2.0), donate_argnums=1)(X, given)
        assert got.unsafe_buffer_pointer() == pointer


def test_equal_ops_share_programs():
    make()(X, Y, a=2.0)
    before = jax.jit(lambda x: make()(x, x, a=2.0) + make()(x, x, a=2.0))
    calls.clear()
    np.testing.assert_array_equal(before(X), 6 * X)
    assert len(calls) == 1  # equal calls are one
    assert make() == make()
    assert hash(make()) == hash(make())


def test_errors_name_the_op():
    def broken(ctx, out, x):
        raise KeyError("broken")

    op = eqxc.Op("an op", {"cpu": eqxc.PythonKernel(broken)}, lambda x: x)
    with pytest.raises(eqxc.KernelError, match="broken") as caught:
        op(X)
    assert isinstance(caught.value.original, KeyError)
    assert "eqxcallback/transform" not in str(caught.value)
    with pytest.raises(eqxc.KernelError, match="broken"), eqxc.raising():
        jax.block_until_ready(jax.jit(op)(X))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: eqxc.PythonKernel(3), r"PythonKernel: expected a function body\(ctx, out, \*args\) -> None; got 3"),  # type: ignore[arg-type]
        (lambda: eqxc.PythonKernel(saxpy_body, out_type=3), r"PythonKernel: expected out_type to be a function; got 3"),  # type: ignore[arg-type]
        (lambda: make(backward="f"), r"Op\(saxpy\): expected a kernel for cpu in backward; got 'f' of type str"),
        (
            lambda: make(backward={"cuda": eqxc.PythonKernel(saxpy_body)}),
            r"kernels for platforms that have one forward",
        ),
        (
            lambda: make(backward={"cpu": saxpy_body}),
            r"Op\(saxpy\): expected a kernel for cpu in backward; got <function",
        ),
    ],
)
def test_wrong_declarations(make, message):
    with pytest.raises(TypeError, match=message):
        make()
