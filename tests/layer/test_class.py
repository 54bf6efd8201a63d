"""Mistakes in a layer's class that are errors as soon as it is written, or with its first call, and would be silent otherwise."""

import inspect
import types
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from .layers import Identity, Wave, X, struct


class Double(eqxc.Layer):
    vmap_method = "fold"

    def kernel(self, ctx, out, x):
        np.multiply(x, 2, out=np.asarray(out))

    def reference(self, x):
        return 2 * x


def derived(**members):
    return type("Derived", (Double,), {"__module__": __name__, **members})


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("vmap_metod", "sequential", "vmap_method"),
        ("input_output_alias", {}, "input_output_aliases"),
        ("side_effect", True, "has_side_effect"),
        ("on_errors", "poison", "on_error"),
        ("out_layouts", None, "output_layouts"),
        ("kernal", lambda self, ctx, out, x: None, "kernel"),
        ("backwards", lambda self, ctx, grads, args, out, cotangents: None, "backward"),
        ("refrence", lambda self, x: x, "reference"),
        ("residual_types", lambda self, x: x, "residual_type"),
        ("out_types", lambda self, x: x, "out_type"),
        ("backward_kernel", {}, "backward_kernels"),
        ("backward_kernals", {}, "backward_kernels"),
    ],
)
def test_a_misspelt_declaration(name, value, meant):
    with pytest.raises(TypeError, match=f"Derived: expected '{meant}'; got '{name}', which declares nothing"):
        derived(**{name: value})


def test_a_misspelt_class_variable():
    with pytest.raises(TypeError, match="expected 'vmap_method'; got 'vmap_metod'"):

        class Annotated(Double):
            vmap_metod: ClassVar[str] = "sequential"


def test_names_of_ones_own():
    class Own(Double):
        output_layout: str = eqx.field(static=True, default="rows")  # a field
        kernel_size = 3
        block_size = 256
        _kernal = None
        kernel1 = eqxc.PythonKernel(lambda ctx, out, self, x: None)
        vmap_method2 = "sequential"
        kernels: ClassVar[Any] = {"cpu": "kernal"}  # it is named there

        def kernal(self, ctx, out, x):
            self.kernel2(out, x)

        def kernel2(self, out, x):
            np.copyto(np.asarray(out), 2 * np.asarray(x))

        def batched(self):
            return self

        @property
        def references(self):
            return ()

    np.testing.assert_array_equal(Own()(X), 2 * X)


def test_an_own_call_that_hides_the_kernel():
    for call in (lambda self, x: x, jax.named_scope("a scope")(lambda self, x: x), eqx.filter_jit(lambda self, x: x)):
        with pytest.raises(TypeError, match=r"Derived: expected no __call__ beside a kernel.*got one that hides it"):
            derived(__call__=call)

    class Mixin:
        def __call__(self, x):
            return x

    with pytest.raises(TypeError, match="hides it"):
        type("Mixed", (Mixin, Double), {})
    type("Mixed", (Double, Mixin), {})


def test_an_own_call_that_calls_the_kernel():
    class Shifted(Double):
        def __call__(self, x):
            return super().__call__(x) + 1

    class Mapped(Double):
        @eqx.filter_jit
        def __call__(self, x):
            return jax.lax.map(lambda row: super(Mapped, self).__call__(row), x)

    np.testing.assert_array_equal(Shifted()(X), 2 * X + 1)
    np.testing.assert_array_equal(Mapped()(X[None]), 2 * X[None])


def test_a_class_without_a_kernel_may_be_called():
    class Abstract(eqxc.Layer):
        def __call__(self, x):
            return x

    with pytest.raises(TypeError, match="hides it"):
        type("Concrete", (Abstract,), {"kernel": lambda self, ctx, out, x: None})


@pytest.mark.parametrize(
    ("kernel", "signature", "problem"),
    [
        (lambda self, out, x: None, "(self, out, x)", "ctx is missing"),
        (lambda self, x, out: None, "(self, x, out)", "ctx is missing"),
        (lambda self, x: None, "(self, x)", "too many positional arguments"),
        (lambda self, ctx, x: None, "(self, ctx, x)", "out is missing"),
        (lambda self, ctx, x, out: None, "(self, ctx, x, out)", "they come in another order"),
        (lambda self, out, ctx, x: None, "(self, out, ctx, x)", "they come in another order"),
    ],
)
def test_arguments_of_a_kernel_in_the_wrong_place(kernel, signature, problem):
    with pytest.raises(TypeError) as caught:
        derived(kernel=kernel)()
    expected = "Derived: expected the kernel for cpu to take (self, ctx, out, ...); its signature is "
    assert str(caught.value).startswith(expected + signature)
    assert problem in str(caught.value)


def test_a_body_in_the_wrong_order():
    with pytest.raises(
        TypeError, match=r"the body of kernels\['cpu'\] to take \(ctx, out, self, \.\.\.\).*another order"
    ):
        derived(kernels={"cpu": eqxc.PythonKernel(lambda self, ctx, out, x: None)})()


def test_other_names_and_arguments_named_out():
    class Sum(eqxc.Layer):
        def kernel(self, _, result, out, ctx):
            np.add(out, ctx, out=np.asarray(result))

        def reference(self, out, ctx):
            return out + ctx

    np.testing.assert_array_equal(Sum()(X, out := X), X + out)


@pytest.mark.parametrize(
    ("argument", "text"), [(3.0, "x = 3.0"), (True, "x = True"), ([1, 2.5], "x[0] = 1, x[1] = 2.5")]
)
def test_numbers_alone_are_not_computed_silently(argument, text):
    with pytest.raises(TypeError) as caught:
        Double()(argument)
    assert f"Double: expected an array among the arguments; got {text}." in str(caught.value)
    assert "Pass jnp.asarray" in str(caught.value)
    with pytest.raises(TypeError, match="expected an array"):
        eqx.filter_jit(Double())(argument)


def test_numbers_that_are_computed():
    class Fill(eqxc.Layer):
        def kernel(self, ctx, out, value):
            calls.append(type(value))
            np.asarray(out)[...] = value

        def out_type(self, value):
            return jax.ShapeDtypeStruct((2,), jnp.float32)

    calls: list[type] = []
    np.testing.assert_array_equal(Fill()(3.0), [3, 3])
    assert calls == [float]
    for number in (np.float32(3), jnp.float32(3), np.array([3.0], np.float32)):
        np.testing.assert_array_equal(Double()(number), 2 * number)
    np.testing.assert_array_equal(jax.jit(Double())(3.0), 6)  # JAX makes it an array


def test_the_signature_is_the_kernels():
    class Options(eqxc.Layer):
        weight: jax.Array

        def kernel(self, ctx, out, x, scale=1.0, *rest, power: int = 2, **others):
            raise NotImplementedError

        def out_type(self, x, scale=1.0, *rest, power: int = 2, **others):
            return struct(x)

    assert str(inspect.signature(Options(jnp.asarray(X)))) == "(x, scale=1.0, *rest, power: int = 2, **others)"
    assert list(inspect.signature(Options).parameters) == ["weight"]
    assert (
        str(inspect.signature(Wave(jnp.asarray(X))))
        == str(inspect.signature(eqx.filter_jit(Wave(jnp.asarray(X)))))
        == "(x)"
    )
    native = {"kernels": {"cpu": eqxc.NativeKernel("f")}, "reference": lambda self, x, y=None: x}
    assert str(inspect.signature(type("Native", (eqxc.Layer,), native)())) == "(x, y=None)"
    np.testing.assert_array_equal(eqx.filter_vmap(Identity(), in_axes={"x": 0})(X), X)


def used():
    """A class of which there is a layer, with kernels by name, and one derived from it."""

    class Used(eqxc.Layer):
        vmap_method = "sequential"
        kernels: ClassVar = {"cpu": "by_name"}

        def by_name(self, ctx, out, x):
            np.multiply(x, 2, out=np.asarray(out))

        def reference(self, x):
            return 2 * x

    class Derived(Used):
        pass

    return Used, Derived


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vmap_method", "fold"),
        ("has_side_effect", True),
        ("input_output_aliases", {"x": 0}),
        ("kernels", {}),
        ("by_name", lambda self, ctx, out, x: None),
        ("kernel", lambda self, ctx, out, x: None),
        ("reference", lambda self, x: 3 * x),
        ("backward", lambda self, ctx, grads, args, out, cotangents: None),
    ],
)
def test_a_declaration_that_is_changed_too_late(name, value):
    """Calls and programs keep what was declared: another one was ignored."""
    for cls in used():
        _, derived = used()
        setattr(derived, name, value)  # no layer was made yet
        np.testing.assert_array_equal(cls()(X), 2 * X)
        before = vars(cls).get(name)
        text = rf"^{cls.__qualname__}: expected {name} to stay as it was when .* Define a subclass that has it"
        with pytest.raises(AttributeError, match=text):
            setattr(cls, name, value)
        assert vars(cls).get(name) is before


def test_a_declaration_of_a_base_is_fixed_with_the_class():
    base, derived = used()
    derived()
    with pytest.raises(AttributeError, match="expected vmap_method to stay"):
        base.vmap_method = "fold"
    with pytest.raises(AttributeError, match="expected vmap_method to stay"):
        del base.vmap_method
    with pytest.raises(AttributeError, match="Layer: expected on_error to stay"):
        eqxc.Layer.on_error = "poison"

    class Folding(base):
        vmap_method = "fold"

        def by_name(self, ctx, out, x):
            np.copyto(np.asarray(out), len(x))

    np.testing.assert_array_equal(jax.vmap(Folding())(jnp.ones((4, 3))), 4)


@pytest.mark.parametrize("cls", used())
def test_a_declaration_may_be_set_again(cls):
    """A copy of it too: cloudpickle sets copies when another process sends back a layer of a class in `__main__`."""
    layer = cls()
    cls.vmap_method, cls.reference, cls.kernels = "sequential", cls.reference, dict(cls.kernels)
    cls.by_name = types.FunctionType(cls.by_name.__code__, cls.by_name.__globals__)
    np.testing.assert_array_equal(layer(X), 2 * X)

    def of(factor):
        return lambda self, x: factor * x

    with pytest.raises(AttributeError, match="expected reference to stay"):
        cls.reference = of(3)


def test_a_mapping_that_is_changed_too_late():
    """Calls of new shapes ran another kernel, and calls of known ones the old one."""

    def times(factor):
        def body(ctx, out, self, x):
            np.multiply(x, factor, out=np.asarray(out))

        return eqxc.PythonKernel(body)

    mine = [times(2)]
    declared = {"cpu": mine}

    class Doubled(eqxc.Layer):
        kernels: ClassVar = declared
        input_output_aliases: ClassVar = {"x": 0}

        def reference(self, x):
            return 2 * x

    cls: Any = Doubled
    cls.kernels["cpu"] = mine  # no layer was made yet
    layer = cls()
    declared["cpu"], mine[0] = [times(3)], times(3)
    np.testing.assert_array_equal(layer(X), 2 * X)
    error = (
        "Doubled.kernels: expected the mapping to stay as it was declared, of 'cpu'; got a change of it. Give another"
    )
    with pytest.raises(TypeError, match=error):
        cls.kernels["cpu"] = mine
    with pytest.raises(TypeError, match=r"Doubled\.input_output_aliases: expected the mapping to stay"):
        cls.input_output_aliases.clear()
    with pytest.raises(TypeError, match=r"Layer\.backward_kernels: expected the mapping to stay .* of nothing"):
        cls.backward_kernels.update(cpu=mine)  # which it inherits
    np.testing.assert_array_equal(layer(jnp.ones(7)), np.full(7, 2))


def test_what_declares_nothing_may_be_changed():
    cls, _ = used()
    cls()
    cls.__doc__, cls.helper, cls.vmap_method = "Doubles.", 3, cls.vmap_method
    assert (cls.__doc__, cls.helper) == ("Doubles.", 3)
    del cls.helper
