"""The memory that attention needs grows with queries plus keys, not with their product."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops

from ..memory import compiled, peak
from ..table import normal, quickly_compiled


@pytest.mark.parametrize("causal", [True, False])
def test_attention_makes_no_array_of_queries_times_keys(causal):
    length = 4096
    q, k, v = (normal(seed, (length, 1, 8)) for seed in range(3))
    program = compiled(lambda q, k, v: ops.attention(q, k, v, causal=causal), q, k, v)
    assert program.memory_analysis().temp_size_in_bytes < 2**20
    assert f"{length},{length}" not in program.as_text()
    assert peak(program, q, k, v) < 4 * length**2 / 8


@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_derivatives_of_attention_make_none_either(implementation):
    """With every option that brings no such array along."""
    length = 4096
    q, k, v = (normal(seed, (length, 1, 8)) for seed in range(3))
    segments, slopes = np.zeros(length, np.int32), np.ones(1, np.float32)
    bias, mask = normal(4, (1, 1, length)), np.ones((1, 1, length), bool)

    def f(q, k, v, slopes, bias, key):
        return ops.attention(
            *(q, k, v),
            **{"causal": True, "window": 900, "soft_cap": 3.0, "alibi_slopes": slopes, "segment_ids": segments},
            **{"bias": bias, "mask": mask},
            **{"lengths": length - 3, "dropout": 0.1, "key": key, "implementation": implementation},
        )

    def gradients(*args):
        return jax.grad(lambda *args: jnp.sin(f(*args)).sum(), (0, 1, 2, 3, 4))(*args)

    def second(*args):
        return jax.grad(lambda *args: sum(jnp.sin(x).sum() for x in gradients(*args)), (0, 1, 2, 3, 4))(*args)

    for function in (f, gradients, second):
        program: Any = quickly_compiled(function).lower(q, k, v, slopes, bias, jax.random.key(0)).compile()
        assert program.memory_analysis().temp_size_in_bytes < 4 * length**2 / 3
        assert f"{length},{length}" not in program.as_text()
