"""The layers that replace Equinox's: what is true of all of them."""

import inspect
import io
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback
from eqxcallback import nn
from eqxcallback.fusion._twins import FUSED

from .drop_ins import CASES, ONE_OF_EACH, randomized


QUICK = {"xla_backend_optimization_level": 0}
TOLERANCE = {jnp.float32: 2e-6, jnp.bfloat16: 2.0**-6, jnp.float16: 2.0**-9}
every_layer = pytest.mark.parametrize("case", ONE_OF_EACH, ids=lambda case: case.name)


def close(got, want, tolerance):
    for g, w in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert (g.shape, g.dtype, g.weak_type) == (w.shape, w.dtype, w.weak_type)
        g, w = (np.asarray(x, np.float32) for x in (g, w))
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance)


def test_every_name_of_equinox():
    for name in (name for name in vars(eqx.nn) if not name.startswith("_")):
        ours, theirs = getattr(nn, name), getattr(eqx.nn, name)
        assert ours is FUSED.get(theirs, theirs)
    assert all(issubclass(ours, theirs) and ours is not theirs for theirs, ours in FUSED.items())


@every_layer
def test_the_same_constructor(case):
    ours, theirs = (inspect.signature(getattr(module, case.name)).parameters for module in (nn, eqx.nn))
    assert list(ours) == [*theirs, "implementation"]
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default)
    assert ours["implementation"].kind == inspect.Parameter.KEYWORD_ONLY
    mine, other = (inspect.signature(getattr(module, case.name).__call__).parameters for module in (nn, eqx.nn))
    assert list(mine) == list(other)
    assert [parameter.kind for parameter in mine.values()] == [parameter.kind for parameter in other.values()]


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, None) for case in CASES), *((case, jnp.bfloat16) for case in ONE_OF_EACH)], ids=str
)
def test_the_same_fields_and_parameters(case, dtype):
    ours, theirs = case.make(dtype=dtype), case.make(eqx.nn, dtype)
    assert isinstance(ours, type(theirs))
    assert type(ours).__name__ == type(theirs).__name__
    assert [*theirs.__dataclass_fields__, "implementation"] == list(ours.__dataclass_fields__)
    assert ours.implementation == "auto"
    for name in theirs.__dataclass_fields__:
        mine, other = getattr(ours, name), getattr(theirs, name)
        if name != "layers":
            assert eqx.tree_equal(mine, other, typematch=True) or mine is other
    (mine, _), (other, _) = map(jax.tree_util.tree_flatten_with_path, (ours, theirs))
    assert [path for path, _ in mine] == [path for path, _ in other]
    for (_, m), (_, o) in zip(mine, other, strict=True):
        if eqx.is_array(o):
            assert m.dtype == o.dtype
            np.testing.assert_array_equal(m, o)
        else:
            assert m is o


def quickly(function, *args):
    return jax.jit(function, compiler_options=QUICK)(*args)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, jnp.float32) for case in CASES), *itertools.product(ONE_OF_EACH, [jnp.bfloat16, jnp.float16])],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_same_values(case, dtype):
    """The values of two examples, of one, and of one outside of `jit`."""
    ours, theirs = (randomized(case.make(module, dtype)) for module in (nn, eqx.nn))
    args = case.inputs(dtype, (2,))
    first = [jax.tree.map(lambda x: x[0], arg) for arg in args]

    def both(layer):
        return jax.vmap(layer)(*args), layer(*first, key=None)

    want = quickly(lambda: both(theirs))
    close(quickly(lambda: both(ours)), want, TOLERANCE[dtype])
    if case in ONE_OF_EACH and dtype == jnp.float32:
        close(ours(*first), want[1], TOLERANCE[dtype])


@every_layer
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_same_gradients(case, dtype):
    args = case.inputs(dtype, (3,))

    def gradients(layer):
        def loss(parts):
            layer, args = eqx.combine(parts, static)
            return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in jax.tree.leaves(jax.vmap(layer)(*args)))

        parts, static = eqx.partition((layer, args), eqx.is_inexact_array)
        return quickly(jax.grad(loss), parts)

    ours, theirs = (gradients(randomized(case.make(module, dtype))) for module in (nn, eqx.nn))
    close(ours, theirs, {jnp.float32: 2e-5, jnp.bfloat16: 2.0**-4}[dtype])


@every_layer
def test_serialised_by_one_and_read_by_the_other(case):
    ours, theirs = case.make(), case.make(eqx.nn)
    for source, target in ((randomized(ours), theirs), (randomized(theirs), ours)):
        file = io.BytesIO()
        eqx.tree_serialise_leaves(file, source)
        file.seek(0)
        read = eqx.tree_deserialise_leaves(file, target)
        assert type(read) is type(target)
        for got, want in zip(*map(jax.tree.leaves, (read, source)), strict=True):
            if eqx.is_array(got):
                np.testing.assert_array_equal(got, want)


@every_layer
@pytest.mark.wrong_types
@pytest.mark.parametrize("change", ["another size", "another rank", "no axes"])
def test_the_same_errors(case, change):
    """Or none, where Equinox has none: the product of a matrix and a matrix is one."""
    ours, theirs = case.make(), case.make(eqx.nn)
    for position in range(len(case.shapes)):
        args = list(jax.tree.leaves(case.inputs()))
        shape = args[position].shape
        shape = {"another size": tuple(n + 1 for n in shape) or (2,), "another rank": (*shape, 2), "no axes": ()}[
            change
        ]
        args[position] = jnp.zeros(shape, args[position].dtype if case.shapes[position] or shape else jnp.float32)
        args = [args[0], tuple(args[1:])] if case.pair else args
        results = []
        for layer in (theirs, ours):
            try:
                results.append(layer(*args))
            except Exception as error:
                results.append(error)
        want, got = results
        if isinstance(want, Exception):
            assert type(got) is type(want)
            if case.name != "RotaryPositionalEmbedding":
                assert str(got) == str(want)
        else:
            close(got, want, 1e-6)


WRONG = [
    ("Linear", (3,), {}),
    ("Linear", (3, 4), {}),
    ("GroupNorm", (3, 4), {}),
    ("GroupNorm", (3,), {}),
    ("Embedding", (3, 4), {}),
    ("Embedding", (-1, 4), {"key": jax.random.key(0)}),
    ("Embedding", (3, -1), {"key": jax.random.key(0)}),
    ("Embedding", (), {"weight": np.zeros(3)}),
    ("Embedding", (3, 5), {"weight": np.zeros((3, 4))}),
    ("RotaryPositionalEmbedding", (3,), {}),
    ("RotaryPositionalEmbedding", (-2,), {}),
    ("MLP", (3, 4, 5), {}),
    ("GRUCell", (3,), {}),
    ("LSTMCell", (3, 4), {}),
]


@pytest.mark.parametrize(("name", "args", "options"), WRONG)
def test_the_same_errors_of_constructors(name, args, options):
    errors = []
    for module in (nn, eqx.nn):
        with pytest.raises((TypeError, ValueError)) as caught:
            getattr(module, name)(*args, **options)
        errors.append(caught)
    ours, theirs = errors
    assert ours.type is theirs.type
    assert str(ours.value) == str(theirs.value)


MIXED = {  # the parameters' dtype, and that of the input
    "wider input": (jnp.bfloat16, jnp.float32),
    "narrower input": (jnp.float32, jnp.bfloat16),
    "two of 16 bits": (jnp.float16, jnp.bfloat16),
    "integers": (jnp.float32, jnp.int32),
    "complex input": (jnp.float32, jnp.complex64),
}


@every_layer
@pytest.mark.parametrize(("dtype", "given"), MIXED.values(), ids=list(MIXED))
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("promotion", ["standard", "strict"])
def test_mixed_dtypes(case, dtype, given, promotion):
    """The layer does what Equinox does with mixed dtypes, and raises an error if Equinox does."""
    ours, theirs = (randomized(case.make(module, dtype)) for module in (nn, eqx.nn))
    args = case.inputs(given)
    with jax.numpy_dtype_promotion(promotion):
        try:
            want = quickly(lambda: theirs(*args))
        except Exception as error:
            with pytest.raises(type(error)):
                quickly(lambda: ours(*args))
            return
        got = quickly(lambda: ours(*args))
    for g, w in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_allclose(*(np.asarray(x, np.complex64) for x in (g, w)), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", ["Linear", "MLP", "GRUCell", "LSTMCell"])
def test_complex_parameters(name):
    case = next(case for case in CASES if case.name == name)
    if name == "MLP":
        case = next(case for case in CASES if case.name == name and jnp.tanh in case.args)
    ours, theirs = (case.make(module, jnp.complex64) for module in (nn, eqx.nn))
    args = case.inputs(jnp.complex64)
    got, want = quickly(lambda: (ours(*args), theirs(*args)))
    for g, w in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert g.dtype == jnp.complex64
        np.testing.assert_allclose(g, w, rtol=1e-6)


@every_layer
def test_in_f64(case, x64):
    ours, theirs = (randomized(case.make(module, jnp.float64)) for module in (nn, eqx.nn))
    args = case.inputs(jnp.float64)
    got, want = quickly(lambda: (ours(*args), theirs(*args)))
    for g, w in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert g.dtype == w.dtype == jnp.float64
        np.testing.assert_allclose(g, w, rtol=1e-13, atol=1e-14)


@every_layer
@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_check_against_equinox(case, implementation):
    """With the parameters among the arguments."""
    ours, theirs = (randomized(layer) for layer in (case.make(implementation=implementation), case.make(eqx.nn)))
    arrays = jax.tree.leaves(eqx.filter(ours, eqx.is_array))

    def of(layer):
        parts, static = eqx.partition(layer, eqx.is_array)
        tree = jax.tree.structure(parts)
        return lambda arrays, *args: eqx.combine(jax.tree.unflatten(tree, arrays), static)(*args)

    rows = ["types", "reference", "vmap of all", "jvp"]
    report = eqxcallback.testing.check(of(ours), arrays, *case.inputs(), reference=of(theirs), only=rows)
    assert not report.failed


@pytest.mark.wrong_types
@every_layer
def test_an_unknown_implementation(case):
    layer = case.make(implementation="fast")
    with pytest.raises(ValueError, match=r"expected implementation to be one of auto, reference, .*; got 'fast'"):
        layer(*case.inputs())


@every_layer
def test_it_is_a_module(case):
    """Static where Equinox's is static, and made again from its leaves."""
    layer = randomized(case.make(implementation="reference"))
    leaves, tree = jax.tree.flatten(layer)
    again = jax.tree.unflatten(tree, leaves)
    assert again.implementation == "reference"
    assert eqx.tree_equal(layer, again)
    args = case.inputs()
    got = eqx.filter_jit(lambda layer, args: layer(*args))(layer, args)
    close(got, layer(*args), 1e-6)


@every_layer
def test_an_ensemble(case):
    """Parameters that are mapped as well."""
    if not eqx.filter(case.make(), eqx.is_inexact_array):
        pytest.skip("it has none")

    def stacked(module):
        layers = [randomized(case.make(module), seed) for seed in (1, 2)]
        arrays, static = zip(*(eqx.partition(layer, eqx.is_inexact_array) for layer in layers), strict=True)
        return eqx.combine(jax.tree.map(lambda *leaves: jnp.stack(leaves), *arrays), static[0])

    args = case.inputs(batch=(2,))
    results = [eqx.filter_vmap(lambda layer, args: layer(*args))(stacked(module), args) for module in (nn, eqx.nn)]
    got, want = results
    close(got, want, 1e-5)
