"""Errors of `Op`, when it is declared and when it is called, and what they say."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc


X = np.ones(3, np.float32)
F32 = jax.ShapeDtypeStruct((3,), jnp.float32)
KERNEL = eqxc.NativeKernel("norm")
TYPED = eqxc.NativeKernel("rms_norm", out_type=lambda x, **_: F32)


def op(kernels: Any = None, reference: Any = lambda x, y=None, **_: x, vmap_method: Any = "sequential"):
    return eqxc.Op("norm", {"cpu": KERNEL} if kernels is None else kernels, reference, vmap_method)


def doubled(ctx, out, x, *, s=2.0):
    np.multiply(x, s, out=np.asarray(out))


def aliased(aliases: Any):
    return eqxc.NativeKernel("f", aliases=aliases)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: op({"gpu": KERNEL}),
            ValueError,
            r"Op\(norm\): expected the keys of kernels to be of \('cpu', 'cuda', 'rocm'\); got 'gpu'",
        ),
        (
            lambda: op({"cpu": "rms_norm"}),
            TypeError,
            r"Op\(norm\): expected a kernel for cpu in kernels; got 'rms_norm' of type str",
        ),
        (
            lambda: op(reference=None),
            ValueError,
            r"the kernel for cpu needs an out_type, because there is no reference",
        ),
        (lambda: op(reference=3), TypeError, r"Op\(norm\): expected reference to be a function; got 3"),
        (lambda: op({}, None), ValueError, r"Op\(norm\): expected a kernel or a reference; got neither"),
        (
            lambda: op({"cpu": eqxc.PythonKernel(doubled)}, lambda x, *, s=3.0: x * s),
            ValueError,
            r"Op\(norm\): expected one default of s; got 3\.0 in its reference, and 2\.0 in doubled\. A call without s would",
        ),
        (
            lambda: op({"cpu": eqxc.PythonKernel(doubled)}, lambda x, *, s=2: x * s),
            ValueError,
            "one default of s; got 2 in",
        ),
        (
            lambda: op(
                {"cpu": eqxc.JaxKernel(lambda x, *, s=3.0: x * s, differentiable=doubled)}, lambda x, *, s=3.0: x * s
            ),
            ValueError,
            r"one default of s; got 3\.0 in its reference, and 2\.0 in doubled",
        ),
        (
            lambda: op(vmap_method="expand"),
            ValueError,
            r"vmap_method to be one of \('fold', 'sequential', .*'threads'\), or a mapping; got 'expand'",
        ),
        (
            lambda: op(vmap_method={"x": "batched"}),
            ValueError,
            r"Op\(norm\): expected vmap_method\['x'\] to be one of "
            r"\('fold', 'sequential', .*'reference', 'threads'\); got 'batched'",
        ),
        (
            lambda: op(vmap_method={"z": "sequential"}),
            ValueError,
            r"Op\(norm\): vmap_method has 'z', which is not a parameter of the op; there are x, y",
        ),
        (
            lambda: op({"cpu": TYPED}, None, {"z": "sequential"}),
            ValueError,
            r"vmap_method has 'z', which is not a parameter of the op; there are x\.",
        ),
        (
            lambda: op({}, lambda *args: args[0], {"x": "sequential"}),
            ValueError,
            r"'x', which is not a parameter of the op; there are none, as its reference has no parameters with names\.",
        ),
        *[
            (
                lambda method=method: op({"cpu": TYPED}, None, method),
                ValueError,
                r'Op\(norm\): expected a reference for vmap_method="reference"; got none',
            )
            for method in ("reference", {"x": "reference"})
        ],
        (
            lambda: op({"cpu": aliased([0])}),
            TypeError,
            r"Op\(norm\): .* to be a mapping; got list",
        ),
        (
            lambda: op({"cpu": aliased({1.0: 0})}),
            TypeError,
            r"a flat index \(int\) or a name \(str\)",
        ),
        (lambda: op({"cpu": aliased({"x": -1})}), ValueError, r"non-negative .* the output -1"),
        (lambda: op({"cpu": aliased({True: 0})}), TypeError, r"got True of type bool"),
    ],
)
def test_a_wrong_declaration(make, error, message):
    with pytest.raises(error, match=message):
        make()


def with_type(out_type, reference=None):
    return op({"cpu": eqxc.NativeKernel("rms_norm", out_type=out_type)}, reference)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: op()(X, eps=X),
            TypeError,
            r"Op\(norm\): expected the option eps to be static and hashable; got ndarray\. Arrays are passed by position",
        ),
        (lambda: op()(X, eps=jnp.ones(3)), TypeError, r"the option eps to be static and hashable; got ArrayImpl"),
        (lambda: op()(X, a=1, eps=[1]), TypeError, r"the option eps to be static and hashable; got list"),
        (lambda: op()(X, eps=(1, [2])), TypeError, r"the option eps to be static and hashable; got tuple"),
        (lambda: jax.jit(lambda e: op()(X, eps=e))(1.0), TypeError, r"the option eps to be static .* got \w*Tracer"),
        (
            lambda: op()("x"),
            TypeError,
            r"Op\(norm\): expected x to be an array or a number; got 'x' of type str\. Static options are passed by keyword\.",
        ),
        (
            lambda: op()(X, {"a": X, "b": [len]}),
            TypeError,
            r"expected y\['b'\]\[0\] to be .*; got <built-in .* of type builtin",
        ),
        (
            lambda: op()(np.array([object()])),
            TypeError,
            r"Op\(norm\): expected x to be .*; got ndarray of dtype object\. No kernel is .* Use a dtype such as float32",
        ),
        (lambda: op(reference=lambda *x: x)(X, "x"), TypeError, r"expected args\[1\] to be .* got 'x'"),
        (
            lambda: op(reference=lambda x, *, s=1.0: x)(),
            TypeError,
            r"^Op\(norm\): missing a required argument: 'x'; its arguments are \(x, \*, s=1\.0\)\.$",
        ),
        (
            lambda: op(reference=lambda x: x)(X, X),
            TypeError,
            r"^Op\(norm\): too many positional arguments; its arguments are \(x\)\.$",
        ),
        (
            lambda: op(reference=lambda x: x)(X, t=1),
            TypeError,
            r"^Op\(norm\): got an unexpected keyword argument 't'; its arguments are \(x\)\.$",
        ),
        (
            lambda: op(reference=lambda x, *, eps: x)(X),
            TypeError,
            r"^Op\(norm\): missing a required .*'eps'; .* \(x, \*, eps\)",
        ),
        (lambda: jax.jit(op(reference=jax.jit(lambda x: x)))(X, X), TypeError, r"^Op\(norm\): too many positional"),
        (lambda: with_type(lambda x: F32)(X, X), TypeError, r"^Op\(norm\): too many positional .* are \(x\)\.$"),
        (
            lambda: with_type(lambda x: 3)(X),
            TypeError,
            r"Op\(norm\): the out_type for cpu has result = 3 of type int; expected `shape` and `dtype`, as of a jax\.Shape",
        ),
        (lambda: with_type(lambda x: {"a": (F32, "f32")})(X), TypeError, r"has result\['a'\]\[1\] = 'f32' of type str"),
        (
            lambda: with_type(lambda x: F32, lambda x: x[:2])(X),
            ValueError,
            r"Op\(norm\): expected one type of results from all; the reference has result of type float32\[2\], and the "
            r"out_type for cpu has result of type float32\[3\]",
        ),
        (
            lambda: op({"cpu": eqxc.PythonKernel(lambda ctx, out, x, *, s: None)}, scaled)(X),
            TypeError,
            r"^Op\(norm\): expected its kernel .*<lambda> to take what it is called with; missing a required .*'s'; its "
            r"arguments are \(ctx, out, x, \*, s\)\.$",
        ),
        (
            lambda: jax.grad(
                eqxc.Op(
                    "norm",
                    {"cpu": eqxc.PythonKernel(lambda ctx, out, x: out.write(np.sum(x)))},
                    jnp.sum,
                    backward=eqxc.PythonKernel(lambda ctx: None),
                )
            )(X),
            TypeError,
            r"^Op\(norm\): expected its kernel .*<lambda> to take what it is called with; too many positional arguments",
        ),
        (
            lambda: op({"cpu": TYPED, "cuda": eqxc.NativeKernel("f", out_type=lambda x: (F32, F32))}, None)(X),
            ValueError,
            r"the out_type for cpu has result of type float32\[3\], and the out_type for cuda has result\[0\] .*, result\[1\]",
        ),
        (
            lambda: op({"cpu": TYPED, "cuda": eqxc.NativeKernel("f", out_type=lambda x: ())}, None)(X),
            ValueError,
            r"the out_type for cuda has none",
        ),
    ],
)
def test_a_wrong_call(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_the_error_of_a_wrong_call_has_the_original():
    with pytest.raises(TypeError, match="too many positional arguments") as caught:
        op(reference=lambda x: x)(X, X)
    assert "takes 1 positional argument but 2 were given" in str(caught.value.__cause__)


def scaled(x, *, s=1.0):
    return x * s


@pytest.mark.parametrize(
    ("call", "error", "text", "note"),
    [
        # None and lists are PyTrees: only the reference knows that it does not take them.
        (lambda: op(reference=scaled)(None), TypeError, "unsupported operand", "called with (None)."),
        (lambda: op(reference=scaled)([1.0, X]), TypeError, "multiply", "called with ([float32[], float32[3]])."),
        (
            lambda: op(reference=lambda x, *, i: x[i])((X,), i=1),
            IndexError,
            "tuple",
            "called with ((float32[3],), i=1).",
        ),
        (
            lambda: jax.jit(op(reference=lambda x, y: x + y))(X, X[:2]),
            TypeError,
            "add",
            "called with (float32[3], float32[2]).",
        ),
    ],
)
def test_an_error_of_the_reference_keeps_its_text(call, error, text, note):
    for _ in range(2):
        with pytest.raises(error) as caught:
            call()
        assert text in str(caught.value)
        assert f"Op(norm): its reference failed, {note}" in caught.value.__notes__


def test_an_error_of_an_out_type_says_whose_it_is():
    def fails(x):
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        with_type(fails)(X)
    assert caught.value.__notes__ == ["Op(norm): its out_type for cpu failed, called with (float32[3])."]


def test_none_and_lists_are_trees():
    twice = op(reference=lambda x, y=None: x[0] if y is None else y)
    np.testing.assert_array_equal(twice.using("reference")([X, 1.0], None), X)


def test_a_wrong_call_is_wrong_again():
    """An error is not kept as what the op is for these types."""
    wrong = with_type(lambda x: 3)
    for _ in range(2):
        with pytest.raises(TypeError, match="the out_type for cpu has result"):
            wrong(X)


ONES, OTHER_ONES = np.ones(3), np.ones(3)


def test_defaults_that_are_no_options():
    """A kernel's own parameters may have any, as may functions that it shares with the reference, and arrays."""

    def reference(x, y=ONES, *, s=2.0, times=np.multiply):
        return x * s

    def kernel(ctx, out, x, y=OTHER_ONES, *, s=2.0, times=np.add, block=64):
        np.multiply(x, s, out=np.asarray(out))

    f = eqxc.Op("own", {"cpu": eqxc.PythonKernel(kernel)}, reference)
    np.testing.assert_array_equal(f(X), 2 * X)
    np.testing.assert_array_equal(jax.grad(lambda x: f(x).sum())(X), np.full(3, 2))


def test_a_forgotten_return():
    def function(ctx, out, x):
        np.copyto(np.asarray(out), np.asarray(x))

    nothing = lambda x: None
    for made, who in (
        (eqxc.op(reference=nothing), "the reference"),
        (eqxc.op(out_type=nothing), "the out_type for cpu"),
    ):
        with pytest.raises(TypeError, match=rf"^Op\(function\): {who} returned None; did it forget 'return'\?"):
            made(function)(X)


def test_results_of_64_bits():
    @eqxc.op(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, np.float64))
    def wide(ctx, out, x):
        np.copyto(np.asarray(out), np.asarray(x))

    text = r"^Op\(wide\): the out_type for cpu: expected results without 64-bit types, .*; got float64\[3\]"
    for f in (wide, jax.jit(wide)):
        with pytest.raises(ValueError, match=text):
            f(X)
    with jax.enable_x64(True):
        assert wide(X).dtype == np.float64


SCALED = eqxc.Op("scaled", {"cpu": eqxc.PythonKernel(doubled)}, lambda x, *, s=2.0: x * s, vmap_method="fold")
SUM = eqxc.Op("sum", {"cpu": eqxc.JaxKernel(lambda a: a["x"] + a["y"])}, lambda a: a["x"] + a["y"])


@pytest.mark.parametrize("of", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_refs_are_refused(of):
    text = (
        r"^Op\(scaled\): expected x to be an array; got .*Ref.*\. Pass the values of a jax\.Ref, x\[\.\.\.\]: a Layer"
    )
    with pytest.raises(TypeError, match=text):
        of(SCALED)(jax.new_ref(X))
    with pytest.raises(TypeError, match=text):
        of(lambda x: SCALED(jax.new_ref(x)))(X)
    np.testing.assert_array_equal(of(lambda ref: SCALED(ref[...]))(jax.new_ref(X)), 2 * X)


def test_views_of_refs_are_refused():
    text = (
        r"^Op\(scaled\): expected x to be an array or a number; got a view of a jax\.Ref\. Pass the values there, ref\["
    )
    with pytest.raises(TypeError, match=text):
        jax.jit(lambda ref: SCALED(ref.at[1]))(jax.new_ref(X))


def test_arrays_on_two_devices():
    x, y = (jax.device_put(X, device) for device in jax.devices()[:2])
    text = r"^Op\(sum\): expected arrays on the same devices; got a\['x'\] on \S*cpu:0 and a\['y'\] on \S*cpu:1\. jax\.device_put"
    with pytest.raises(ValueError, match=text):
        SUM({"x": x, "y": y})
