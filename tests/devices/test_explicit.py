"""Meshes whose shardings are part of types: those of results, tangents and gradients are those of pure JAX."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import eqxcallback as eqxc

from .layers import LANES, Lane, Scale, ScaleBackward, assert_close, calls, normal, put, run, squares, tanh, twice


SIZE = 4

lanes = pytest.mark.parametrize("lane", LANES[1:3], ids=str)


def types(tree):
    return [str(jax.typeof(leaf)) for leaf in jax.tree.leaves(tree)]


def same_types(function, lane, *args):
    """Values and types."""
    ran = run(function(lane.call), *args)
    want = jax.jit(function(lane.reference))(*args)
    assert_close(ran.values, want)
    traced = jax.eval_shape(jax.jit(function(lane.call)), *args)
    assert types(traced) == types(want)
    return ran


@pytest.mark.parametrize("lane", LANES[:3], ids=str)
@pytest.mark.parametrize("derivative", ["value", "grad", "jvp"])
def test_without_jit(lane, explicit, derivative):
    """Eager calls are split as well."""
    function = lambda f: DERIVATIVES[derivative](twice(f))
    with jax.set_mesh(explicit):
        args = put(normal(SIZE), explicit), put(normal(4, 2, SIZE), explicit, "a", "b")
        got, want = function(lane.call)(*args), function(lane.reference)(*args)
        assert_close(got, want)
        assert types(got) == types(want)
        assert {shape for _, shape in calls} <= {(2, SIZE)}


DERIVATIVES = {
    "value": lambda f: f,
    "grad": lambda f: jax.grad(squares(f), (0, 1)),
    "grad of x": lambda f: jax.grad(squares(f), 1),
    "jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (w, x)),
    "hessian": lambda f: jax.hessian(squares(f)),
    "reverse-over-reverse": lambda f: jax.grad(squares(jax.grad(squares(f), 1)), (0, 1)),
    "scan": lambda f: lambda w, x: jax.lax.scan(lambda c, _: (f(w, c), None), x, None, length=3)[0],
    "grad of scan": lambda f: jax.grad(
        lambda w, x: jax.lax.scan(lambda c, _: (f(w, c), None), x, None, length=3)[0].sum(), (0, 1)
    ),
    "while": lambda f: lambda w, x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, f(w, c[1])), (0, x))[1],
    "cond": lambda f: lambda w, x: jax.lax.cond(x.sum() > 1e3, f, lambda w, x: f(w, f(w, x)), w, x),
    "remat": lambda f: jax.grad(jax.checkpoint(squares(f)), (0, 1)),
}


@lanes
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_split_examples(lane, explicit, derivative):
    with jax.set_mesh(explicit):
        for spec in (("a",), ("a", "b")):
            x = put(normal(4, 2, SIZE), explicit, *spec)
            ran = same_types(lambda f: DERIVATIVES[derivative](twice(f)), lane, put(normal(SIZE), explicit), x)
            assert ran.gathers == 0
            if derivative != "hessian":  # which maps over the directions as well
                assert {shape for _, shape in ran.calls} <= {(8 // 2 ** len(spec), SIZE)}


@lanes
def test_gradients_of_each_example(lane, explicit):
    with jax.set_mesh(explicit):
        per_example = lambda f: jax.vmap(jax.grad(squares(jax.vmap(f, (None, 0))), (0, 1)), (None, 0))
        ran = same_types(per_example, lane, put(normal(SIZE), explicit), put(normal(4, 2, SIZE), explicit, "a"))
        assert ran.gathers == ran.sums == 0
        ensemble = lambda f: jax.vmap(jax.grad(squares(jax.vmap(f, (None, 0))), (0, 1)))
        weights = put(normal(4, SIZE), explicit, "a")
        ran = same_types(ensemble, lane, weights, put(normal(4, 2, SIZE), explicit, "a"))
        assert ran.gathers == ran.sums == 0


@lanes
@pytest.mark.parametrize("derivative", ["grad", "grad of x", "hessian", "reverse-over-reverse", "remat"])
@pytest.mark.parametrize("weight_spec", [(), ("b",)], ids=str)
def test_a_dimension_that_no_kernel_may_split(lane, explicit, derivative, weight_spec):
    """The call gathers it, and its gradient is split again as the operand is."""
    with jax.set_mesh(explicit):
        weight, x = put(normal(SIZE), explicit, *weight_spec), put(normal(4, 2, SIZE), explicit, "a", None, "b")
        function = lambda f: DERIVATIVES[derivative](twice(f))
        if derivative == "hessian" and not weight_spec:
            # JAX cannot do this by itself: results, which the kernel's are not, are split by an axis that the weight lacks.
            function = lambda f: jax.jacfwd(squares(twice(f)))
        got = run(function(lane.call), weight, x)
        assert_close(got.values, jax.jit(function(lane.reference))(np.asarray(weight), np.asarray(x)))
        gradients = jax.jit(jax.grad(squares(twice(lane.call)), (0, 1)))(weight, x)
        assert types(gradients) == types((weight, x))


@lanes
def test_results_are_whole_where_kernels_are(lane, explicit):
    """The difference from pure JAX, and what a user does about it."""
    with jax.set_mesh(explicit):
        x = put(normal(4, 2, SIZE), explicit, "a", None, "b")
        weight = put(normal(SIZE), explicit)
        assert types(jax.jit(twice(lane.call))(weight, x)) == ["float32[4@a,2,4]"]
        primal, tangent = jax.jit(lambda w, x: jax.jvp(twice(lane.call), (w, x), (w, x)))(weight, x)
        assert types((primal, tangent)) == ["float32[4@a,2,4]"] * 2
        step = lambda c, _: (twice(lane.call)(weight, c), None)
        with pytest.raises(TypeError, match="carry"):
            jax.jit(lambda x: jax.lax.scan(step, x, None, length=2)[0])(x)
        again = lambda c, _: (jax.sharding.reshard(step(c, None)[0], jax.P("a", None, "b")), None)
        assert types(jax.jit(lambda x: jax.lax.scan(again, x, None, length=2)[0])(x)) == ["float32[4@a,2,4@b]"]


def test_operands_that_disagree(explicit):
    """JAX itself says so for the axis of a `vmap`. Dimensions that a rule names together are moved to where the first one is."""
    lane = LANES[1]
    with jax.set_mesh(explicit):
        weights, x = put(normal(4, SIZE), explicit, "b"), put(normal(4, SIZE), explicit, "a")
        with pytest.raises(ValueError, match="vmap"):
            jax.jit(jax.vmap(lane.call))(weights, x)

        class Split(ScaleBackward):
            sharding = "d, d -> d"

        weight, x = put(normal(SIZE), explicit, "b"), put(normal(SIZE), explicit, "a")
        split = lambda w, x: Split(w)(x)
        assert types(jax.jit(split)(weight, x)) == ["float32[4@b]"]
        gradients = jax.jit(jax.grad(squares(split), (0, 1)))(weight, x)
        assert types(gradients) == ["float32[4@b]", "float32[4@a]"]
        want = jax.grad(squares(lane.reference), (0, 1))(normal(SIZE), normal(SIZE))
        assert_close(gradients, want)


@lanes
def test_mixed_meshes(lane):
    """One axis in types, one that XLA sees to."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit, AxisType.Auto))
    with jax.set_mesh(mesh):
        for spec in (("a",), ("a", "b")):
            x = put(normal(4, 2, SIZE), mesh, *spec)
            for derivative in ("value", "grad", "jvp"):
                ran = run(DERIVATIVES[derivative](twice(lane.call)), put(normal(SIZE), mesh), x)
                want = jax.jit(DERIVATIVES[derivative](twice(lane.reference)))(put(normal(SIZE), mesh), x)
                assert_close(ran.values, want)
                assert types(ran.values) == types(want)
                assert ran.gathers == 0


@lanes
def test_shard_map_within(lane, explicit):
    """Over all axes, and over one, where the other one is gathered."""
    with jax.set_mesh(explicit):
        weight, x = put(normal(SIZE), explicit), put(normal(4, 2, SIZE), explicit, "a", "b")
        for names in ({"a", "b"}, {"a"}):
            spec = jax.P("a", "b") if len(names) == 2 else jax.P("a")
            mapped = lambda f, spec=spec, names=names: jax.shard_map(
                twice(f), in_specs=(jax.P(), spec), out_specs=spec, axis_names=names
            )
            for derivative in ("value", "grad"):
                function = lambda f, derivative=derivative, mapped=mapped: DERIVATIVES[derivative](mapped(f))
                got = run(function(lane.call), weight, x).values
                want = jax.jit(function(lane.reference))(weight, x)
                assert_close(got, want)
                assert types(got) == types(want)


@pytest.mark.parametrize("method", ["sequential", "sequential_unrolled"])
@pytest.mark.parametrize("derivative", ["value", "grad", "jvp", "scan"])
def test_a_loop_over_examples(method, derivative, explicit):
    """Each device runs it over all of them, and the results are split as the examples are."""

    class Loop(Scale):
        vmap_method = method

    lane = Lane("loop", lambda w, x: Loop(w)(x), tanh)
    over_examples = lambda f: DERIVATIVES[derivative](jax.vmap(f, (None, 0)))
    with jax.set_mesh(explicit):
        for spec in (("a",), (("a", "b"),), ()):
            ran = same_types(over_examples, lane, put(normal(SIZE), explicit), put(normal(8, SIZE), explicit, *spec))
            assert {shape for _, shape in ran.calls} == {(SIZE,)}


def test_references_do_not_see_the_mesh(explicit):
    """Types are those of one example, wherever the examples lie: JAX says of what this adds that it varies over devices."""

    class Write(eqxc.Layer):
        vmap_method = "broadcast_all"

        def kernel(self, ctx, out, x, row):
            array = np.asarray(out)
            array[...] = np.asarray(x)
            array[..., :1, :] = np.asarray(row) + 1

        def reference(self, x, row):
            return jax.lax.dynamic_update_slice(x, row + jnp.broadcast_to(jnp.ones(()), row.shape), (0, 0))

    lane = Lane("write", Write(), Write().reference)
    with jax.set_mesh(explicit):
        args = put(normal(4, 3, SIZE), explicit, "a"), put(normal(4, 1, SIZE), explicit, "a")
        same_types(jax.vmap, lane, *args)
        same_types(lambda f: jax.grad(squares(jax.vmap(f)), (0, 1)), lane, *args)


def test_auto_axes_within(explicit):
    with jax.set_mesh(explicit):
        weight, x = put(normal(SIZE), explicit), put(normal(4, 2, SIZE), explicit, "a", "b")
        spec = jax.NamedSharding(explicit, jax.P("a", "b"))
        inner = jax.sharding.auto_axes(twice(LANES[1].call), out_sharding=spec)
        ran = run(inner, weight, x)
        assert ran.calls == {("forward", (2, SIZE)): 4}
        assert types(ran.values) == ["float32[4@a,2@b,4]"]


def test_effects(explicit):
    class Effect(Scale):
        has_side_effect = True

    def nothing(ctx, out, x):
        calls.append(("forward", x.shape))

    callback = eqxc.buffer_callback(nothing, None, has_side_effect=True)
    with jax.set_mesh(explicit):
        x = put(normal(4, 2, SIZE), explicit, "a")
        ran = run(lambda w, x: (twice(lambda w, x: Effect(w)(x))(w, x), x + 1)[1], normal(SIZE), x)
        assert ran.calls == {("forward", (4, SIZE)): 4}
        assert types(ran.values) == ["float32[4@a,2,4]"]
        assert run(lambda x: (callback(x), x + 1)[1], x).calls == {("forward", (4, 2, SIZE)): 4}


def test_two_results_of_which_one_is_differentiated(explicit, grid):
    """The cotangent of the other one is made by us: it has the type that its result has."""

    class Two(eqxc.Layer):
        weight: jax.Array
        vmap_method = "fold"

        def kernel(self, ctx, out, x):
            out[0].write(np.tanh(np.asarray(x) * np.asarray(self.weight)))
            out[1].write(np.asarray(x) ** 2)

        def reference(self, x):
            return jnp.tanh(x * self.weight), x**2

    class TwoBackward(Two):
        def backward(self, ctx, grads, args, out, cotangents):
            inner = np.asarray(cotangents[0]) * (1 - np.asarray(out[0]) ** 2)
            value = inner * np.asarray(self.weight) + 2 * np.asarray(args[0]) * np.asarray(cotangents[1])
            if grads[1] is not None:
                grads[1].write(value)
            if grads[0].weight is not None:
                of_weight = inner * np.asarray(args[0])
                array = np.asarray(grads[0].weight)
                array[...] = of_weight.sum(tuple(range(of_weight.ndim - array.ndim)))

    spec = jax.P("a", "b")
    for cls, which in itertools.product((Two, TwoBackward), (0, 1)):
        lane = Lane("two", lambda w, x, cls=cls: cls(w)(x), lambda w, x: (jnp.tanh(x * w), x**2))
        for derivative in ("grad", "hessian"):
            function = lambda f, i=which, name=derivative: DERIVATIVES[name](lambda w, x: twice(f)(w, x)[i])
            with jax.set_mesh(explicit):
                same_types(function, lane, put(normal(SIZE), explicit), put(normal(4, 2, SIZE), explicit, *spec))
            # Inside of shard_map such zeros must vary as the result does.
            inside = lambda f, function=function: jax.shard_map(
                lambda w, x: jax.tree.leaves(function(f)(w, x))[0],
                mesh=grid,
                in_specs=(jax.P(), spec),
                out_specs=jax.P(),
            )
            args = normal(SIZE), put(normal(4, 2, SIZE), grid, *spec)
            assert_close(run(inside(lane.call), *args).values, jax.jit(inside(lane.reference))(*args))
