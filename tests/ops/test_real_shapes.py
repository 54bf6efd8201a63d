"""Kernels at the widths of models that people run, of which benchmarks have the speed; with few rows."""

import numpy as np
import pytest

from benchmarks.shapes import MODELS

from .families import FAMILIES
from .table import DTYPES


pytestmark = pytest.mark.any_jax_version


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_values(model, isa):
    for family in FAMILIES.values():
        for row in family.of_model(model) if hasattr(family, "of_model") else ():
            case, want = row.wanted(DTYPES[0])
            case.check(case.op(*case.args), want)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_sizes_fit_together(model):
    assert model.heads * model.head_size == model.embedding
    assert model.heads % model.kv_heads == 0
    weights = model.layers * sum(int(np.prod(size)) for size in model.matrices.values())
    assert 84e6 < weights < 107e6  # of all four, without embeddings
