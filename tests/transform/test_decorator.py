"""An op of the function below a decorator."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc


@eqxc.op(reference=lambda x, y, *, a: a * x + y, vmap_method="broadcast_all", aliases={"y": 0})
def saxpy(ctx, out, x, y, *, a):
    result = np.asarray(out)
    np.add(np.multiply(x, a), y, out=result)


def double(x):
    return 2 * x


@eqxc.op(reference=double)
def doubled(ctx, out, x):
    np.multiply(x, 2, out=np.asarray(out))


def test_it_is_an_op():
    assert isinstance(saxpy, eqxc.Op)
    assert saxpy.name == "saxpy"
    assert set(saxpy.kernels) == {"cpu"}
    x = jnp.arange(3.0)
    np.testing.assert_array_equal(saxpy(x, jnp.ones(3), a=2.0), [1, 3, 5])
    np.testing.assert_array_equal(jax.vmap(lambda x: saxpy(x, x, a=2.0))(jnp.ones((2, 3))), np.full((2, 3), 3))
    np.testing.assert_array_equal(jax.grad(lambda x: saxpy(x, x, a=2.0).sum())(x), np.full(3, 3))
    assert eqxc.testing.check(saxpy, x, jnp.ones(3), a=2.0).passed


def test_its_fields():
    @eqxc.op(
        out_type=lambda x: x,
        platforms=("cpu", "cuda"),
        name="twice",
        supports=lambda types: types[0].ndim == 1 or "one axis",
    )
    def function(ctx, out, x):
        np.multiply(x, 2, out=np.asarray(out))

    assert (function.name, set(function.kernels)) == ("twice", {"cpu", "cuda"})
    assert function(jnp.ones(2)).tolist() == [2, 2]
    with pytest.raises(ValueError, match="one axis"):
        function(jnp.ones((2, 2)))


def test_a_function_of_triton():
    pytest.importorskip("triton", reason="Triton is not installed")
    from ..testing.triton_kernels import row_sums

    fields = {"scalars": {"size": ("int32", lambda x: x.shape[1])}, "constexprs": {"BLOCK": 128}}
    sums = eqxc.op(reference=lambda x: 2 * x.sum(1), grid=lambda x, **_: x.shape[0], **fields)(row_sums)
    assert (sums.name, set(sums.kernels)) == ("row_sums", {"cuda"})
    (call,) = eqxc.inspect(sums, jnp.ones((3, 100)), platform="cuda").calls
    assert call.launches[0].grid == (3, 1, 1)


def test_what_nobody_has():
    with pytest.raises(
        TypeError, match=r"eqxcallback\.op: expected a field of Op or PythonKernel; got 'grid'\. There are alia"
    ):
        eqxc.op(reference=jnp.negative, grid=3)(lambda ctx, out, x: None)


def test_without_its_brackets():
    with pytest.raises(TypeError, match=r"expected fields by name; got <function .*, with its brackets"):

        @eqxc.op
        def nothing(ctx, out, x):
            pass

    with pytest.raises(ValueError, match="needs an out_type"):
        eqxc.op()(lambda ctx, out, x: None)


def test_programs_and_reports_have_its_name():
    x = jnp.arange(3.0)
    program = jax.jit(saxpy, static_argnames="a")
    assert saxpy.__name__ == "saxpy"
    assert eqxc.Op.__name__ == "Op"
    assert "module @jit_saxpy" in program.lower(x, x, a=2.0).as_text()
    report = eqxc.inspect(doubled, x)
    assert str(report).startswith("doubled: 1 external call")
    assert report.calls[0].path == "jit(doubled)/doubled"


def test_an_op_with_a_name_is_one_value():
    """Two that are equal share programs, and another name is another op."""
    first, second = (eqxc.Op(name, {}, double) for name in ("a", "b"))
    again = pickle.loads(pickle.dumps(first))
    assert (again, again.__name__, hash(again)) == (first, "a", hash(first))
    assert first != second
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def call(op, x):
        traces.append(op.name)
        return op(x)

    for op in (first, again, second, first.using("reference").using("auto")):
        call(op, jnp.ones(2))
    assert traces == ["a", "b"]
