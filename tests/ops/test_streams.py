"""Results that are larger than the caches, which kernels write past them: the same as those of calls that are smaller."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops


ROOT = pathlib.Path(__file__).parents[2]
LAST_CACHE_BYTES = 32 << 20
ROWS, PARTS = 4100, 4


def rotated(x, y):
    del y
    angles = jnp.arange(x.shape[1] // 2, dtype=jnp.float32)
    cos, sin = (jnp.tile(f(angles), (x.shape[0], 1)) for f in (jnp.cos, jnp.sin))
    return ops.rotary_embedding(x[:, None], cos, sin)[:, 0]


# Of rows that know nothing of each other.
OPS = {
    "rms_norm": lambda x, y: ops.rms_norm(x, jnp.arange(x.shape[1], dtype=jnp.float32)),
    "layer_norm": lambda x, y: ops.layer_norm(x),
    "swiglu": lambda x, y: ops.swiglu(x, y),
    "swiglu of halves": lambda x, y: ops.swiglu(x),
    "geglu": lambda x, y: ops.geglu(x, y),
    "rotary_embedding": rotated,
}


def test_the_limit():
    text = (ROOT / "csrc/cpu/kernels/streams.h").read_text()
    assert re.findall(r"kLastCacheBytes = int64_t\{(\d+)\} << 20;", text) == [str(LAST_CACHE_BYTES >> 20)]


@pytest.mark.parametrize("size", [1056, 1058], ids=["whole vectors", "others"])
@pytest.mark.parametrize("op", OPS)
def test_large_results(isa, op, size):
    x, y, upstream = (
        np.asarray(jax.random.normal(jax.random.key(seed), (ROWS, size), jnp.float32)) for seed in range(3)
    )
    assert 2 * x.nbytes > LAST_CACHE_BYTES > 5 * x.nbytes / PARTS

    @jax.jit
    def results(x, y, upstream):
        out, pull = jax.vjp(OPS[op], x, y)
        return out, pull(upstream[:, : out.shape[1]])

    whole = results(x, y, upstream)
    parts = [results(*arrays) for arrays in zip(*(np.split(a, PARTS) for a in (x, y, upstream)), strict=True)]
    for got, *want in zip(*map(jax.tree.leaves, (whole, *parts)), strict=True):
        np.testing.assert_array_equal(got, np.concatenate(want))
