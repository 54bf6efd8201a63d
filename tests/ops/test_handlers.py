"""The handlers in C++ trust nobody: called by hand, with what the functions of `ops` would never pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import _ext, xla

from .handled import a, of_every_family


GOOD = {case: row for table in of_every_family("HANDLED") for case, row in table.items()}
# Operands that have to be where results are.
IN_PLACE = {"cache_append": {0: 0}, "rotary_append": {3: 1, 4: 2}}
# Results that are memory of a kernel's own, of which some processors write a part.
MEMORY = {"matrix_product": 1}
WRONG = [row for table in of_every_family("NOT_HANDLED") for row in table]


@pytest.fixture(scope="module", autouse=True)
def registered():
    for name, (handler, _) in _ext.cpu_ops().items():
        xla.register_handler(f"eqxcallback_{name}", handler, "cpu")


def call(op, args, result, attributes, aliases=None):
    results = result if isinstance(result, list) else [result]
    struct = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]
    f = jax.ffi.ffi_call(f"eqxcallback_{op}", struct, input_output_aliases=aliases, has_side_effect=True)
    return jax.block_until_ready(jax.jit(lambda *args: f(*args, **attributes))(*args))


def symbol_of(case):
    return case.split(",")[0]


@pytest.mark.parametrize("case", GOOD)
def test_accepted(case):
    op, (args, result, attributes) = symbol_of(case), GOOD[case]
    outs = call(op, args, result, attributes, aliases=IN_PLACE.get(op))
    for i, (out, want) in enumerate(zip(outs, result if isinstance(result, list) else [result], strict=True)):
        assert (out.shape, out.dtype) == (want.shape, want.dtype)
        if i != MEMORY.get(op):
            np.testing.assert_array_equal(out, want)


def test_every_handler_is_here():
    assert set(_ext.cpu_ops()) == set(map(symbol_of, GOOD))


@pytest.mark.parametrize(("op", "args", "result", "attributes", "message"), WRONG)
def test_refused(op, args, result, attributes, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"INVALID_ARGUMENT: {op}\[native\]: ") as error:
        call(op, args, result, attributes)
    error.match(message)


@pytest.mark.parametrize("case", GOOD)
def test_wrong_numbers_of_operands_and_results(case):
    op, (args, result, attributes) = symbol_of(case), GOOD[case]
    results = result if isinstance(result, list) else [result]
    for wrong_args, wrong_result in (
        (args[:-1], result),
        ([*args, a(1)], result),
        (args, []),
        (args, [*results, results[0]]),
    ):
        with pytest.raises(
            jax.errors.JaxRuntimeError,
            match=r"operands, \d of them in the mask|results, (one for each operand|or two)|[Ww]rong number of|log-sum-exps",
        ):
            call(op, wrong_args, wrong_result, attributes)


@pytest.mark.parametrize("case", [case for case, (_, _, attributes) in GOOD.items() if attributes])
def test_wrong_attributes(case):
    op, (args, result, attributes) = symbol_of(case), GOOD[case]
    wrong = [{}, {**attributes, "other": np.int64(1)}]
    for name, value in attributes.items():
        wrong += [
            {key: value for key, value in attributes.items() if key != name},
            {**attributes, name: np.float32(1)},
            {**attributes, name: np.arange(3, dtype=np.float32)},
            {**attributes, name: np.int64(1) if isinstance(value, str) else "1"},
        ]
    for given in wrong:
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"attribute|data type|[Aa]ttr"):
            call(op, args, result, given)


def test_the_process_is_well_afterwards():
    with pytest.raises(jax.errors.JaxRuntimeError, match="norm"):
        call("norm", [a(2, 3)], a(2, 4), GOOD["norm, plain"][-1])
    assert jnp.zeros(3).sum() == 0
    test_accepted("norm")
