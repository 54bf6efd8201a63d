"""`vmap_method="threads"`: a kernel of one example, called for each on XLA's threads."""

import os
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import CKernel, JaxKernel, Layer, NativeKernel, NumbaKernel, Op, PythonKernel

from .library import build


_FOLDER = tempfile.TemporaryDirectory(prefix="eqxcallback-each-")
LIBRARY = Path(_FOLDER.name, "libeach.so")
NUMBERS = ("int64_t x.ndim", "int64_t x.size", "float a")
ARRAYS = ("const float* x", "const float* w", "float* out")
STATUS = {2: "expected one axis", 3: "expected numbers >= 0"}
BACKWARD = CKernel("cumulate_backward", LIBRARY, ("dout.size", "float a", "float* dout", "float* dx", "float* dw"))


def cumulate(out, x, w, a):
    total = 0.0
    for i in range(x.shape[0]):
        if x[i] < 0:
            raise ValueError
        total += x[i]
        out[i] = a * total + w[i]


C = CKernel("cumulate", LIBRARY, (*NUMBERS, *ARRAYS), status=STATUS)
KERNELS: dict[str, Any] = {
    "c": C,
    "native": NativeKernel("Cumulate", LIBRARY),
    "asynchronous": NativeKernel("CumulateLater", LIBRARY),
    "numba": NumbaKernel(cumulate),
}


def reference(x, w, *, a):
    return a * jnp.cumsum(x) + w


def op(kind: str = "c", method: str = "threads", **more: Any) -> Op:
    return Op(kind, kernels={"cpu": KERNELS[kind]}, reference=reference, vmap_method=method, **more)


@pytest.fixture(autouse=True, scope="module")
def library():
    build(LIBRARY, "each.cc", "-ldl")


# Numba takes its time to compile: once is enough.
ONCE = {"numba": pytest.mark.any_jax_version}


@pytest.fixture(params=[pytest.param(kind, marks=ONCE.get(kind, ())) for kind in KERNELS])
def kind(request):
    return request.param


rng = np.random.default_rng(0)
W = jnp.arange(5.0)


def randoms(*shape: int) -> jax.Array:
    return jnp.asarray(rng.random(shape), jnp.float32)


def expected(x, w=W, a=2.0):
    return a * np.cumsum(np.asarray(x), -1) + np.asarray(w)


@pytest.mark.parametrize("examples", [0, 1, 2, 17, 1000])
def test_any_number_of_examples(kind, examples):
    x = randoms(examples, 5)
    got = jax.vmap(lambda x: op(kind)(x, W, a=2.0))(x)
    np.testing.assert_allclose(got, expected(x), rtol=1e-5)


def test_every_nest_of_maps(kind):
    """The operands have the axes that map them: what is shared is not tiled where no map touches it."""
    x, w = randoms(2, 3, 5), randoms(3, 5)
    call = lambda x, w: op(kind)(x, w, a=0.5)
    twice = jax.jit(jax.vmap(jax.vmap(call, (0, None)), (0, None)))
    np.testing.assert_allclose(twice(x, W), expected(x, a=0.5), rtol=1e-5)
    inner = jax.jit(jax.vmap(jax.vmap(call), (0, None)))
    np.testing.assert_allclose(inner(x, w), expected(x, w, 0.5), rtol=1e-5)
    other = jax.vmap(call, (None, 0), out_axes=1)(x[0, 0], w)
    np.testing.assert_allclose(other, expected(x[0, 0], w, 0.5).T, rtol=1e-5)


def test_one_call_of_the_program_whose_target_says_so():
    x = jnp.ones((7, 5))
    function = jax.vmap(lambda x: op("native")(x, W, a=1.0))
    inspection = eqxc.inspect(function, x)
    (call,) = inspection.calls
    assert (call.times, call.examples) == (1, 7)
    assert call.operands == ("float32[5]", "float32[5]")
    assert call.results == ("float32[5]",)
    assert call.target is not None
    assert call.target.startswith("eqxcallback_Cumulate_")
    assert call.target.endswith("_examples")
    assert "removed" not in call.note
    assert "for each of 7 examples, on XLA's threads" in str(inspection)
    text = jax.jit(function).lower(x).compile().as_text() or ""
    assert text.count(f'custom_call_target="{call.target}"') == 1
    (call,) = eqxc.inspect(lambda x: op("native")(x, W, a=1.0), x[0]).calls
    assert call.examples == 1


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="XLA has one thread here")
def test_examples_run_side_by_side_without_the_lock():
    function = CKernel("meet", LIBRARY, ("const int32_t* x", "int64_t* out"), out_type=out_of_meet)
    meet = Op("meet", kernels={"cpu": function}, vmap_method="threads")
    with jax.enable_x64(True):
        alone = np.asarray(jax.vmap(meet)(jnp.ones(1, jnp.int32)))
        assert alone[0, 1] == 0
        out = np.asarray(jax.vmap(meet)(jnp.zeros(64, jnp.int32)))
    assert out[:, 1].tolist() == [2] * 64
    assert out[:, 2].tolist() == [0] * 64
    assert len(set(out[:, 0].tolist())) > 1


def out_of_meet(x):
    return jax.ShapeDtypeStruct((3,), jnp.int64)


MESSAGES = {
    "c": "it returned 3: expected numbers >= 0",
    "native": "expected numbers >= 0; the first one is -21",
    "asynchronous": "expected numbers >= 0; the first one is -",
    "numba": "it returned 1: it raised an exception",
}


def test_an_error_of_one_example_is_that_of_the_call(kind):
    """The first one, once all have been called."""
    x = jnp.ones((100, 5)).at[21, 0].set(-21.0).at[77, 0].set(-77.0)
    function = jax.vmap(lambda x: op(kind)(x, W, a=2.0))
    where = "" if kind == "asynchronous" else "example 21 of 100: "
    for call in (function, jax.jit(function)):
        with pytest.raises(Exception, match=f"{where}{MESSAGES[kind]}"):
            jax.block_until_ready(call(x))
    np.testing.assert_allclose(function(abs(x)), expected(abs(x)), rtol=1e-5)


def test_an_exception_of_a_handler_is_an_error():
    throws = Op("throws", kernels={"cpu": NativeKernel("Throws", LIBRARY)}, reference=reference, vmap_method="threads")
    x = jnp.ones((9, 5)).at[4, 1].set(-1.0)
    with pytest.raises(Exception, match=r"example 4 of 9: it threw a C.. exception: of a negative number"):
        jax.block_until_ready(jax.vmap(lambda x: throws(x, W, a=2.0))(x))
    text = r"throws\[native\]: kernel Throws: it threw a C.. exception: of a negative number"
    for call in (throws, jax.jit(throws, static_argnames="a")):
        with pytest.raises(eqxc.KernelError, match=text), eqxc.raising():
            call(x[4], W, a=2.0)
    np.testing.assert_array_equal(throws(x[0], W, a=2.0), throws(x[1], W, a=2.0))


@pytest.mark.parametrize("in_axes", [(0, None), (0, 0), (None, 0)])
def test_gradients_are_those_of_sequential(in_axes):
    """Gradients of each example, summed over examples where an operand is shared."""
    args = [jnp.asarray(rng.random((4, 5) if axis == 0 else (5,)), jnp.float32) for axis in in_axes]
    loss = lambda op: lambda x, w: (op(x, w, a=2.0) ** 2).sum()
    summed = lambda op: lambda *args: jax.vmap(loss(op), in_axes)(*args).sum()
    results = []
    for method in ("threads", "sequential"):
        it = op("c", method, backward=BACKWARD)
        one = jax.jit(jax.vmap(jax.grad(loss(it), (0, 1)), in_axes))(*args)
        results.append([*one, *jax.jit(jax.grad(summed(it), (0, 1)))(*args)])
    expected = jax.grad(summed(lambda x, w, *, a: reference(x, w, a=a)), (0, 1))(*args)
    for got, want in zip(results[0], [*results[1][:2], *expected], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    target = "".join(eqxc.inspect(jax.grad(summed(op(backward=BACKWARD)), (0, 1)), *args).calls[-1].target or "")
    assert "cumulate_backward" in target
    assert target.endswith("_examples")


def test_what_maps_and_devices_make_of_it():
    x = jnp.asarray(rng.random(5) + 0.5, jnp.float32)
    rows = ("grad", "vmap", "vmap of all", "nested vmap", "grad of vmap", "scan", "shard_map", "sharded jit")
    assert eqxc.testing.check(op(backward=BACKWARD), x, W, a=2.0, only=rows).passed


def test_a_result_that_overwrites_an_operand():
    """Each example has a result of its own; the caller's array stays."""
    function = CKernel("cumulate", LIBRARY, (*NUMBERS, "x", "out", "out"), status=STATUS, aliases={"w": 0})
    add = Op("add", kernels={"cpu": function}, reference=reference, vmap_method="threads")
    x = randoms(6, 5)
    got = jax.vmap(lambda x, w: add(x, w, a=1.0), (0, None))(x, W)
    np.testing.assert_allclose(got, expected(x, a=1.0), rtol=1e-5)
    np.testing.assert_array_equal(W, np.arange(5.0))


def test_workspaces_and_rows_are_those_of_one_example():
    source = """void copy(long n, long rows, const float* x, float* scratch, float* out) {
      for (long i = 0; i < n; ++i) scratch[i] = x[i] + (float)rows;
      for (long i = 0; i < n; ++i) out[i] = scratch[i];
    }"""
    function = CKernel(
        "copy",
        source=source,
        parameters=("x.size", "x.shape[0]", "x", "workspace[0]", "out"),
        workspaces=lambda x: (jax.ShapeDtypeStruct(x.shape, x.dtype),),
        out_type=lambda x: x,
    )
    copy = Op("copy", kernels={"cpu": function}, vmap_method="threads")
    x = randoms(50, 3, 2)
    np.testing.assert_array_equal(jax.vmap(copy)(x), x + 3)


def test_two_devices():
    """Each has a part of the examples."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x = jax.device_put(randoms(8, 5), where)
    out = jax.jit(jax.vmap(lambda x: op("native")(x, W, a=2.0)))(x)
    np.testing.assert_allclose(out, expected(x), rtol=1e-5)
    assert out.sharding.is_equivalent_to(where, 2)


def test_a_layer():
    class Sums(Layer):
        w: jax.Array
        vmap_method = "threads"
        kernels: ClassVar[Any] = {
            "cpu": CKernel("cumulate", LIBRARY, ("x.ndim", "x.size", "float 2", "x", "self.w", "out"))
        }

        def reference(self, x):
            return 2 * jnp.cumsum(x) + self.w

    layer, x = Sums(W), randoms(6, 5)
    np.testing.assert_allclose(jax.vmap(layer)(x), jax.vmap(layer.reference)(x), rtol=1e-5)


def test_checked_mode():
    with eqxc.debug.checked():
        for kind in ("c", "native"):
            got = jax.vmap(lambda x, kind=kind: op(kind)(x, W, a=2.0))(jnp.ones((3, 5)))
            np.testing.assert_allclose(got, expected(np.ones((3, 5))))


def test_an_exported_program_has_any_number_of_examples():
    """And is found again by what `register` registers."""
    (examples,) = jax.export.symbolic_shape("n")
    program = eqxc.export(jax.jit(jax.vmap(lambda x: op("native")(x, W, a=2.0))))(
        jax.ShapeDtypeStruct((examples, 5), jnp.float32)
    )
    op("native").register()
    loaded = eqxc.load(bytes(program.serialize()))
    for n in (1, 4):
        np.testing.assert_allclose(loaded.call(jnp.ones((n, 5)))[-1], expected(np.ones(5)))


def test_other_kernels_are_called_one_after_the_other():
    """They are part of the program, or launch what a GPU runs side by side."""
    function = JaxKernel(reference)
    both = Op("both", kernels={"cpu": function}, reference=reference, vmap_method="threads")
    x = randoms(3, 2, 5)
    got = jax.vmap(jax.vmap(lambda x: both(x, W, a=2.0)))(x)
    np.testing.assert_allclose(got, expected(x), rtol=1e-5)


def body(ctx, out, x, w, *, a):
    np.asarray(out)[...] = a * np.cumsum(np.asarray(x)) + np.asarray(w)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (
            {"kernels": {"cpu": PythonKernel(body)}},
            'expected kernels without Python for vmap_method="threads", in C, C.. or Numba; got body for cpu, which holds '
            """Python's lock. Use "sequential", or "fold" if it takes a leading axis""",
        ),
        ({"kernels": {"cpu": C}, "backward": PythonKernel(body)}, "got body for cpu"),
        (
            {"kernels": {"cpu": PythonKernel(body)}, "vmap_method": {"x": "threads"}},
            "expected kernels without Python .* got body for cpu",
        ),
    ],
)
def test_what_threads_cannot_call(declared, message):
    with pytest.raises(ValueError, match=message):
        Op("wrong", **{"reference": reference, "vmap_method": "threads", **declared})


def test_layers_that_threads_cannot_call():
    class OfPython(Layer):
        vmap_method = "threads"

        def kernel(self, ctx, out, x):
            np.copyto(np.asarray(out), np.asarray(x))

        def reference(self, x):
            return x

    with pytest.raises(ValueError, match=r"OfPython: expected kernels without Python .* got .*kernel for cpu"):
        OfPython()

    class OfBackward(Layer):
        vmap_method = "threads"
        kernels: ClassVar[Any] = {"cpu": C}

        def reference(self, x, w):
            return x

        def backward(self, ctx, grads, args, out, cotangents):
            pass

    with pytest.raises(ValueError, match=r"OfBackward: .* got .*backward for any platform, which holds Python's lock"):
        OfBackward()


def test_elements_that_share_a_byte():
    function = NativeKernel("Cumulate", LIBRARY, out_type=lambda x: x)
    packed = Op("packed", kernels={"cpu": function}, vmap_method="threads")
    with pytest.raises(Exception, match=r"expected examples that begin with a byte; got an array of int4"):
        jax.block_until_ready(jax.vmap(packed)(jnp.ones((4, 3), jnp.int4)))
