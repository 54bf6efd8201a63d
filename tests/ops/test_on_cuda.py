"""docs/gpus.md says what runs on a GPU, as it is."""

import functools
import inspect
import pathlib
from typing import get_args

import jax.numpy as jnp

from eqxcallback import ops

from . import on_cuda, without_kernels


PAGE = pathlib.Path(__file__).parents[2] / "docs" / "gpus.md"
rows = functools.cache(on_cuda.rows)


def test_the_page_is_up_to_date():
    assert on_cuda.of_page(PAGE.read_text()) == on_cuda.table(rows()), "python -m tests.ops.on_cuda prints it"


def test_no_definition_runs_on_a_gpu():
    assert not [row for row, words in rows().items() if any("definition" in text for text in words)]


def test_rows_of_several_calls_are_of_one_kernel():
    assert not [row for row, words in rows().items() if any(" or " in text for text in words)]


def test_definitions_that_are_differentiated():
    """They have no product, which would be in f32: but that of `linear`, whose rule multiplies what it is given."""
    by_xla = {row for row, words in rows().items() if words[2] == "XLA"}
    checked = set()
    for call in on_cuda.calls(jnp.bfloat16):
        if (call.op.__name__, call.words) in by_xla:
            checked.add((call.op.__name__, call.words))
            products = on_cuda.products_of_the_definition(call)
            assert set(products) == ({("bf16", "bf16")} if call.op is ops.linear else set()), call
    assert checked == by_xla


def test_what_multiplies_f64(x64):
    """XLA's products, and not the definition's, but for those of `linear`: blocks are not multiplied in f64."""
    checked = set()
    for call in on_cuda.calls(jnp.float64):
        if not call.op.__name__.startswith("quantized") and on_cuda.products_of_the_definition(call):
            checked.add(call.op)
            assert set(on_cuda.kinds(call)) == {"reference" if call.op is ops.linear else "jax"}, call
    attentions = {ops.attention, ops.attention_with_lse, ops.decode_attention}
    assert checked == {*attentions, ops.linear, ops.int8_linear, ops.linear_cross_entropy}


def test_every_row_without_a_kernel_says_why():
    without = {row for row, words in rows().items() if any("XLA" in text or "two ops" in text for text in words[:2])}
    assert without == {row for rows_of_one, _ in without_kernels.REASONS for row in rows_of_one}


def test_the_page_has_the_reasons():
    assert f"\n{without_kernels.page()}\n\n" in PAGE.read_text(), "python -m tests.ops.without_kernels prints them"


def test_every_keyword_of_every_op_is_there():
    takes_an_implementation = {
        function
        for function in vars(ops).values()
        if inspect.isfunction(function) and {"implementation", "options"} & set(inspect.signature(function).parameters)
    }
    given: dict[object, set[str]] = {op: set() for op in takes_an_implementation}
    for call in on_cuda.calls(jnp.bfloat16):
        given[call.op] |= call.keywords
    missing = {op.__name__: set(on_cuda.parameters(op)) - given[op] for op in takes_an_implementation}
    assert not {name: keywords for name, keywords in missing.items() if keywords}


def test_every_choice_of_a_keyword_is_there():
    choices = {"encoding": get_args(ops.Encoding), "activations": get_args(ops.Activations)}
    for name, values in choices.items():
        given = {call.options[name] for call in on_cuda.calls(jnp.bfloat16) if name in call.options}
        assert given >= set(values) - {"exact"}
