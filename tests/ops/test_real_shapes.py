"""Kernels at the widths of models that people run, of which benchmarks have the speed; with few rows."""

import numpy as np
import pytest

from benchmarks.shapes import MODELS

from . import cases
from .cases import made


F32 = cases.DTYPES[0]


def cases_of(model):
    heads = (model.heads, model.kv_heads, model.head_size)
    yield cases.layer_norm, (3, model.embedding)
    yield cases.rms_norm, (3, model.embedding)
    yield cases.swiglu, (2, model.hidden)
    yield cases.rotary_embedding, (5, model.heads, model.head_size), True
    yield cases.softmax_cross_entropy, (2, model.vocabulary)
    yield cases.attention, (), 33, 65, *heads, model.causal
    yield cases.decode_attention, (2,), 130, *heads
    for encoding in cases.ENCODINGS:
        yield cases.quantized_linear, encoding, (), model.hidden, model.embedding


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_values(model, isa):
    for make in cases_of(model):
        case, want = made(F32, *make)
        case.check(case.op(*case.args), want)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_sizes_fit_together(model):
    assert model.heads * model.head_size == model.embedding
    assert model.heads % model.kv_heads == 0
    weights = model.layers * sum(int(np.prod(size)) for size in model.matrices.values())
    assert 84e6 < weights < 107e6  # of all four, without embeddings
