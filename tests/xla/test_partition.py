"""The rule by which a call is split, as XLA is given it."""

import jax.numpy as jnp
import pytest

from eqxcallback.transform import parse_sharding
from eqxcallback.xla import result_aval
from eqxcallback.xla.calls import _partition


@pytest.mark.parametrize("rule", ["row n -> row bins", "row n -> row _", "row _ -> row _"])
def test_a_name_of_results_alone_is_whole(rule):
    x, out = result_aval((4, 6), jnp.float32), result_aval((4, 3), jnp.float32)
    factors = parse_sharding(rule, [0], [x], [out], "op")
    assert factors.operands == factors.results == (("own_row", None),)
    assert _partition._rule(factors, [x.shape, out.shape]) is not None
