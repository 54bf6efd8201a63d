"""The declarations of a layer, and what is said of a wrong one: once, when it is first built."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from .layers import X, struct


def copy_kernel(self, ctx, out, x):
    np.copyto(np.asarray(out), np.asarray(x))


DEFAULTS = {"kernel": copy_kernel, "reference": lambda self, x: x, "vmap_method": "fold"}


def declared(base: Any = eqxc.Layer, **members):
    """A layer with these members; `...` stands for none."""
    members = {**(DEFAULTS if base is eqxc.Layer else {}), **members}
    members = {name: value for name, value in members.items() if value is not ...}
    return type("Wrong", (base,), {"__module__": __name__, **members})


def takes(*_, **__):
    return None


SHAPES = [struct(X), jax.ShapeDtypeStruct((2,), jnp.float32)]

DECLARATIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    # Options.
    (
        {"vmap_method": "bogus"},
        ValueError,
        r"Wrong: expected vmap_method to be one of \('fold', .*'threads'\); got 'bogus'",
    ),
    ({"vmap_method": None}, ValueError, r"vmap_method to be one of .*got None"),
    ({"vmap_method": "legacy_vectorized"}, ValueError, r"vmap_method to be one of .*got 'legacy_vectorized'"),
    ({"vmap_method": ["fold"]}, ValueError, r"vmap_method to be one of .*got \['fold'\]"),
    (
        {"vmap_method": "reference", "reference": ..., "out_type": lambda self, x: x},
        ValueError,
        r'Wrong: expected a reference for vmap_method="reference"; there is none',
    ),
    ({"on_error": "ignore"}, ValueError, r"Wrong: expected on_error to be one of \('raise', 'poison'\); got 'ignore'"),
    ({"has_side_effect": 1}, TypeError, r"Wrong: expected has_side_effect to be True or False; got 1 of type int"),
    ({"command_buffer_compatible": "yes"}, TypeError, r"command_buffer_compatible .* got 'yes' of type str"),
    # Methods.
    ({"kernel": ...}, TypeError, r"<none>"),
    ({"reference": ...}, TypeError, r"Wrong: nothing says what it returns\. Define `out_type` or `reference`"),
    (
        {"kernel": ..., "reference": ...},
        TypeError,
        r"Wrong: there is no(thing| kernel).*Define `kernel\(self, ctx, out",
    ),
    ({"kernel": ..., "reference": ..., "out_type": lambda self, x: x}, TypeError, r"Wrong: there is no kernel"),
    ({"kernel": staticmethod(takes)}, TypeError, r"Wrong: expected kernel to be a method; got a staticmethod"),
    ({"kernel": classmethod(takes)}, TypeError, r"Wrong: expected .*kernel.*; got <classmethod"),
    ({"kernel": property(takes)}, TypeError, r"Wrong: expected .*kernel.*; got <property"),
    ({"kernel": 3}, TypeError, r"Wrong: expected .*kernel.*; got 3"),
    ({"reference": 3}, TypeError, r"Wrong: expected reference to be a method; got 3 of type int"),
    ({"reference": staticmethod(takes)}, TypeError, r"Wrong: expected reference to be a method; got a staticmethod"),
    ({"out_type": 3}, TypeError, r"Wrong: expected out_type to be a method; got 3"),
    ({"backward": 3}, TypeError, r"Wrong: expected backward .*got 3"),
    ({"batch": "rows"}, TypeError, r"Wrong: expected batch .*got 'rows'"),
    ({"jvp": staticmethod(takes)}, TypeError, r"Wrong: expected jvp to be a method; got a staticmethod"),
    ({"residual_type": lambda self, x: x}, TypeError, r"residual_type .* `backward`, but there is none"),
    ({"residual_type": 3, "backward": takes}, TypeError, r"expected residual_type to be a method; got 3"),
    # Signatures.
    (
        {"kernel": lambda self: None},
        TypeError,
        r"kernel for cpu to take \(self, ctx, out, \.\.\.\); its signature is \(self\)",
    ),
    ({"kernel": lambda self, ctx: None}, TypeError, r"kernel for cpu to take .*; its signature is \(self, ctx\)"),
    ({"kernel": lambda self, ctx, *, out: None}, TypeError, r"kernel for cpu to take .*\(self, ctx, \*, out\)"),
    (
        {"backward": lambda self, ctx, grads, args, out: None},
        TypeError,
        r"expected backward to take \(self, ctx, grads, args, out, cotangents\); its signature is .*args, out\)",
    ),
    ({"backward": lambda self, ctx, g, a, o, c, more: None}, TypeError, r"expected backward to take .*more"),
    ({"jvp": lambda self, args: None}, TypeError, r"expected jvp to take \(self, args, tangents\)"),
    ({"batch": lambda self, size, args: None}, TypeError, r"expected batch to take \(self, axis_size, in_axes, args\)"),
    (
        {"reference": lambda self, x, y: x},
        TypeError,
        r"Wrong: expected reference to take \(x\).*its signature is \(self, x, y\)",
    ),
    ({"reference": lambda self: 1}, TypeError, r"Wrong: expected reference to take \(x\)"),
    (
        {"kernel": lambda self, ctx, out, x, y: None, "reference": lambda self, y, x: x},
        TypeError,
        r"Wrong: expected reference to take \(x, y\).*its signature is \(self, y, x\), in another order",
    ),
    ({"out_type": lambda self: SHAPES[0]}, TypeError, r"Wrong: expected out_type to take \(x\)"),
    (
        {"residual_type": lambda self, a, b: a, "backward": takes},
        TypeError,
        r"Wrong: expected residual_type to take \(x\)",
    ),
    # Kernels.
    (
        {"kernel": ..., "kernels": ["cpu"]},
        TypeError,
        r"expected kernels to be a mapping from platforms to kernels; got list",
    ),
    ({"kernel": ..., "kernels": {"gpu": "f"}, "f": copy_kernel}, ValueError, r"keys of kernels .*'rocm'\); got 'gpu'"),
    (
        {"kernel": ..., "kernels": {"cpu": "f"}},
        ValueError,
        r"kernels\['cpu'\] is 'f', which is not a method of the layer",
    ),
    (
        {"kernel": ..., "kernels": {"cpu": 3}},
        TypeError,
        r"expected kernels\['cpu'\] to be a kernel or the name .*got 3",
    ),
    ({"kernel": ..., "kernels": {"cpu": "vmap_method"}}, TypeError, r"Wrong: expected .*got 'fold'"),
    ({"kernels": {"cpu": eqxc.PythonKernel(takes)}}, TypeError, r"Wrong: there are `kernel` and `kernels`"),
    ({"kernel": ..., "kernels": {}, "reference": ...}, TypeError, r"Wrong: there is no kernel"),
    (
        {"kernel": ..., "kernels": {"rocm": "f"}, "f": copy_kernel},
        ValueError,
        r"kernels\['rocm'\] is a Python kernel; expected it for one of \('cpu', 'cuda'\)",
    ),
    (
        {"kernels": {"cpu": "kernel", "cuda": "f"}, "f": lambda self, ctx, out, x, y: None},
        TypeError,
        r"expected the kernel for cuda to take \(x\).*\(self, ctx, out, x, y\)",
    ),
    (
        {"kernel": ..., "kernels": {"cpu": eqxc.PythonKernel(lambda ctx: None)}},
        TypeError,
        r"body of kernels\['cpu'\] to take \(ctx, out, self, \.\.\.\); its signature is \(ctx\)",
    ),
    (
        {"kernel": ..., "kernels": {"cpu": eqxc.PythonKernel(takes, out_type=takes)}},
        TypeError,
        r"kernels\['cpu'\] has an out_type; expected it to be defined by the layer",
    ),
    (
        {"kernel": ..., "kernels": {"cpu": eqxc.JaxKernel(takes, differentiable=takes)}},
        TypeError,
        r"kernels\['cpu'\] has a `differentiable` function, which is for an Op. Define `jvp` or `reference`",
    ),
    (
        {"kernel": ..., "kernels": {"cpu": eqxc.NativeKernel("f")}, "on_error": "poison"},
        ValueError,
        r"on_error='poison' is for Python kernels; kernels\['cpu'\] is f, which is none",
    ),
    # Backward kernels.
    ({"backward_kernels": [0]}, TypeError, r"Wrong: expected backward_kernels to be a mapping; got list"),
    (
        {"backward_kernels": {"rocm": eqxc.NativeKernel("f")}},
        ValueError,
        r"backward_kernels\['rocm'\] is for a platform without a kernel forward; there are cpu, cuda",
    ),
    (
        {"backward_kernels": {"cpu": eqxc.PythonKernel(takes)}},
        TypeError,
        r"expected backward_kernels\['cpu'\] to be a kernel that is not Python's; got .*Define `backward` for that",
    ),
    (
        {"backward_kernels": {"cpu": eqxc.NativeKernel("f", aliases={0: 0})}},
        TypeError,
        r"backward_kernels\['cpu'\] has an out_type or aliases",
    ),
    (
        {"backward_kernels": {"cpu": eqxc.NativeKernel("f")}, "on_error": "poison"},
        ValueError,
        r"on_error='poison' is for Python kernels; backward_kernels\['cpu'\] is f, which is none",
    ),
    # Aliases.
    ({"input_output_aliases": [0]}, TypeError, r"Wrong: expected input_output_aliases to be a mapping; got list"),
    ({"input_output_aliases": None}, TypeError, r"Wrong: expected input_output_aliases to be a mapping; got NoneType"),
    ({"input_output_aliases": {"x": -1}}, ValueError, r"Wrong: expected non-negative indices .* got the output -1"),
    ({"input_output_aliases": {True: 0}}, TypeError, r"each input .* got True of type bool"),
    ({"input_output_aliases": {1.0: 0}}, TypeError, r"each input .* got 1\.0 of type float"),
    ({"input_output_aliases": {"x": None}}, TypeError, r"each output .* got None of type NoneType"),
    ({"input_output_aliases": {"y": 0}}, ValueError, r"the input 'y', which is not a parameter of the kernel \(x\)"),
    (
        {"input_output_aliases": {"out": 0}},
        ValueError,
        r"the input 'out', which is not a parameter of the kernel \(x\)",
    ),
    ({"input_output_aliases": {"0": 0}}, ValueError, r"the input '0', which is not a parameter"),
    ({"input_output_aliases": {"self": 0}}, ValueError, r"the input 'self', which is not a parameter"),
    ({"input_output_aliases": {"self.w": 0}}, ValueError, r"the input 'self\.w', which is not a field of the layer"),
]


@pytest.mark.parametrize(("members", "error", "message"), DECLARATIONS)
def test_a_wrong_declaration(members, error, message):
    make = declared(**members)
    if message == "<none>":
        make()
        return
    for _ in range(2):  # an error is not taken for a success
        with pytest.raises(error, match=message):
            make()


RIGHT: list[dict[str, Any]] = [
    {"kernel": ...},  # the reference runs
    {"kernel": None},
    {"kernels": {"cpu": "kernel"}},
    {"kernels": {"cuda": "kernel"}},
    {"kernel": ..., "kernels": {"cpu": "f"}, "f": copy_kernel},
    {"kernel": ..., "kernels": {"cpu": copy_kernel}},
    {"kernel": lambda *args: copy_kernel(*args)},
    {"kernel": lambda self, *args: copy_kernel(self, *args)},
    {"kernel": lambda self, ctx, out, *xs: copy_kernel(self, ctx, out, *xs), "reference": lambda self, *xs: xs[0]},
    {"kernel": lambda self, ctx, out, /, x: copy_kernel(self, ctx, out, x)},
    {"reference": lambda self, *args, **kwargs: args[0]},
    {"reference": lambda self, y: y},
    {"reference": lambda self, x, unused=3: x},
    {"reference": jax.jit(lambda self, x: x)},
    {"reference": eqx.filter_jit(lambda self, x: x)},
    {"reference": jax.named_scope("a scope")(lambda self, x: x)},
    {"out_type": lambda self, x: struct(x)},
    {"out_type": lambda self, x: x, "reference": ...},
    {"backward": lambda *args: None},
    {"backward": lambda self, ctx, grads, args, out, cotangents, more=1: None},
    {"jvp": lambda self, *both: None, "batch": lambda self, *three: (three[-1][0], 0)},
    {"input_output_aliases": {np.int64(0): np.int32(0)}},
    {"input_output_aliases": {"x": 0}},
]


@pytest.mark.parametrize("members", RIGHT)
def test_a_right_declaration(members):
    layer = declared(**members)()
    np.testing.assert_array_equal(layer(X), X)
    np.testing.assert_array_equal(jax.jit(lambda x: layer(x))(X), X)
    np.testing.assert_array_equal(jax.vmap(layer)(X[None]), X[None])


def test_a_subclass_with_other_kernels():
    """The more derived one holds."""
    base = declared()
    native = declared(
        base, kernels={"cpu": eqxc.PythonKernel(lambda ctx, out, self, x: copy_kernel(self, ctx, out, x))}
    )
    back = declared(native, kernel=lambda self, ctx, out, x: np.copyto(np.asarray(out), 2 * np.asarray(x)))
    np.testing.assert_array_equal(native()(X), X)
    np.testing.assert_array_equal(back()(X), 2 * X)


def test_what_is_checked_of_fields():
    class Field(eqxc.Layer):
        w: jax.Array
        vmap_method = "fold"
        kernel = copy_kernel

        def reference(self, x):
            return x

    for name in ("self.w", "x"):
        np.testing.assert_array_equal(declared(Field, input_output_aliases={name: 0})(jnp.asarray(X))(X), X)
    with pytest.raises(
        ValueError, match=r"'w', .* of the kernel \(x\)\. It is an array of the layer: write 'self\.w'\.$"
    ):
        declared(Field, input_output_aliases={"w": 0})(jnp.asarray(X))


# Calls.


class TwoArguments(eqxc.Layer):
    vmap_method = "fold"

    def kernel(self, ctx, out, x, y=2, *, z=None):
        np.copyto(np.asarray(out), np.asarray(x))

    def reference(self, x, y=2, *, z=None):
        return x


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self):
        return "UNHASHABLE"


CALLS: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((), {}, r"TwoArguments: a call takes \(x, y=2, \*, z=None\); got 0 positional .*missing a required argument: 'x'"),
    ((X, 1, 2), {}, r"TwoArguments: a call takes .*got 3 positional arguments and the keywords \[\] \(too many"),
    ((X,), {"w": 1}, r"TwoArguments: a call takes .*keywords \['w'\].*unexpected keyword argument 'w'"),
    ((X,), {"x": X}, r"TwoArguments: a call takes .*multiple values for argument 'x'"),
    ((X, {1, 2}), {}, r"TwoArguments: expected everything that is not an array .*hashable; got \{1, 2\} of type set"),
    ((X,), {"z": {"a": [Unhashable()]}}, r"static and hashable; got UNHASHABLE of type Unhashable"),
    ((X, bytearray(b"1")), {}, r"static and hashable; got bytearray"),
    ((np.array(["text"]),), {}, r"TwoArguments: expected x to be an array or a number; got ndarray of dtype <U4"),
]


@pytest.mark.parametrize(("args", "kwargs", "message"), CALLS)
def test_a_wrong_call(args, kwargs, message):
    for f in (TwoArguments(), lambda *args, **kwargs: jax.jit(lambda: TwoArguments()(*args, **kwargs))()):
        with pytest.raises(TypeError, match=message):
            f(*args, **kwargs)


def with_types(out_type, reference=None, **members):
    return declared(out_type=out_type, reference=... if reference is None else reference, **members)()


TYPES: list[tuple[Any, type[Exception], str]] = [
    (
        lambda: with_types(lambda self, x: SHAPES[1], lambda self, x: x),
        ValueError,
        r"Wrong: expected out_type and reference to agree; out_type says \['float32\[2\]'\], and reference gives "
        r"\['float32\[3\]'\]\.",
    ),
    (
        lambda: with_types(lambda self, x: jax.ShapeDtypeStruct((3,), jnp.float16), lambda self, x: x),
        ValueError,
        r"out_type says \['float16\[3\]'\]",
    ),
    (lambda: with_types(lambda self, x: (x,), lambda self, x: x), ValueError, r"\(\*,\).* gives .* in \*"),
    (lambda: with_types(lambda self, x: {"a": x}, lambda self, x: {"b": x}), ValueError, r"'a'.*'b'"),
    (lambda: with_types(lambda self, x: (x, 1), lambda self, x: (x, True)), ValueError, r"1.*True"),
    (lambda: with_types(lambda self, x: (x, None), lambda self, x: (x,)), ValueError, r"None"),
    (
        lambda: with_types(lambda self, x: jax.ShapeDtypeStruct((-1,), jnp.float32)),
        TypeError,
        r"Wrong\.out_type: expected the types of arrays; got .*\(-1,\)",
    ),
    (
        lambda: with_types(lambda self, x: x.shape),
        TypeError,
        r"Wrong\.out_type: expected the types of arrays, `jax\.ShapeDtypeStruct`s; got \(3,\)\.",
    ),
    (lambda: with_types(lambda self, x: (x, {1})), TypeError, r"Wrong\.out_type: .*static and hashable; got \{1\}"),
    (
        lambda: declared(reference=lambda self, x: (x, {1}))(),
        TypeError,
        r"Wrong\.\S+: .*static and hashable; got \{1\}",
    ),
    (
        lambda: declared(input_output_aliases={0: 0}, reference=lambda self, x: x[:2])(),
        ValueError,
        r"Wrong: .*input x of type float32\[3\], output result of type float32\[2\]",
    ),
    (
        lambda: declared(input_output_aliases={0: 1})(),
        ValueError,
        r"Wrong: .*the output 1, but there are 1 flat outputs",
    ),
    (
        lambda: declared(input_output_aliases={1: 0})(),
        ValueError,
        r"Wrong: .*the input 1, but there are 1 flat inputs \(0: x\)",
    ),
]


@pytest.mark.parametrize(("make", "error", "message"), TYPES)
def test_types_that_do_not_fit(make, error, message):
    layer = make()
    for f in (layer, jax.jit(layer.__call__), jax.vmap(layer, axis_size=2, in_axes=None)):
        with pytest.raises(error, match=message):
            f(X)


def test_two_inputs_of_one_output():
    members = {"kernel": lambda self, ctx, out, x, y: None, "reference": lambda self, x, y: (x, y)}
    for aliases in ({0: 0, 1: 0}, {"x": 0, "y": 0}, {"x": 0, 1: 0}):
        with pytest.raises(ValueError, match=r"Wrong: input_output_aliases uses the output result\[0\] twice"):
            declared(**members, input_output_aliases=aliases)()(X, X)


def test_float0_is_no_operand():
    with pytest.raises(TypeError, match="Wrong: expected arrays; got one of float0"):
        declared()()(np.zeros(3, jax.dtypes.float0))
