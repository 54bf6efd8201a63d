"""Every op under `vmap` and derivatives on a real GPU: the tests of the kernels for CPUs, as close as a GPU comes."""

import jax
import pytest

from ..ops import table, test_transformations as transformations
from ..ops.attention.cases import attention, with_every_option
from ..ops.families import tagged
from .conftest import require_gpu
from .values import F32, tolerate, tolerate_products


pytestmark = pytest.mark.gpu

require_gpu()


by_row = pytest.mark.parametrize("row", tagged("mapped"), ids=str)


@pytest.fixture
def case(row, monkeypatch):
    """As close as a GPU comes, and with its compiler's usual options."""
    is_attention = row.make in (attention, with_every_option)
    monkeypatch.setattr(table, "tolerate", tolerate_products if is_attention else tolerate)
    monkeypatch.setattr(table, "quickly_compiled", jax.jit)
    monkeypatch.setattr(transformations, "OF_LARGEST", 4e-6)
    with jax.default_matmul_precision("highest"):  # else products are in TF32
        yield row(F32)


@by_row
def test_vmap_of_each_operand(case):
    transformations.test_vmap_of_each_operand(case)


@by_row
def test_nested_vmap(case):
    transformations.test_nested_vmap(case)


@by_row
def test_derivatives(case):
    transformations.test_derivatives(case)
