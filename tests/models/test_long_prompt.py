"""Attention over a sequence that is split over devices, and prompts that are read with it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import eqxcallback as eqxc
from models import gguf, llama
from models.parallel.long_prompt import LongPromptReader, cache_of
from models.parallel.ring_attention import ring_attention
from models.parallel.tensor_parallel import AXIS

from .test_parallel import collectives, mesh_of
from .tiny import write_tiny


def ring(causal, count):
    return jax.shard_map(
        lambda q, k, v: ring_attention(q, k, v, AXIS, causal),
        mesh=mesh_of(count),
        in_specs=jax.P(AXIS),
        out_specs=jax.P(AXIS),
    )


def operands(dtype=np.float32, length=24):
    random = np.random.default_rng(0)
    return [jnp.asarray(random.standard_normal((length, heads, 16)), dtype) for heads in (6, 2, 2)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("count", "dtype", "bound"), [(8, jnp.float32, 5e-6), (2, jnp.bfloat16, 0.03)])
def test_values_and_gradients(causal, count, dtype, bound):
    weights = np.random.default_rng(1).standard_normal((24, 6, 16)).astype(np.float32)

    def results(attention):
        def loss(*args):
            out = attention(*args)
            return (out.astype(jnp.float32) * weights).sum(), out

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))

    got = results(ring(causal, count))(*operands(dtype))
    want = results(lambda *args: eqxc.ops.attention(*args, causal=causal))(*operands(dtype))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == dtype
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=bound, atol=bound)


def test_gradients_are_those_of_finite_differences():
    check_grads(jax.jit(ring(True, 3)), operands(length=6), order=1, modes=["rev"], rtol=1e-2, atol=1e-2)


def test_slices_go_round_and_nothing_is_gathered():
    attention = ring(True, 4)
    sharding = jax.NamedSharding(mesh_of(4), jax.P(AXIS))
    args = [jax.device_put(x, sharding) for x in operands()]
    assert collectives(jax.jit(attention).lower(*args).compile()) == {"collective-permute": 6}  # k and v, 3 times
    gradient = jax.jit(jax.grad(lambda *args: attention(*args).sum(), (0, 1, 2)))
    # Backward k and v go round again, and their gradients one step further: home.
    assert collectives(gradient.lower(*args).compile()) == {"collective-permute": 6 + 6 + 8}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny(path, {"attn_q": "Q8_0", "ffn_down": "Q8_0"}, context=1000)
    return llama.load(gguf.open_model(path))


@pytest.mark.parametrize("length", [1, 100])
def test_a_prompt_is_read_as_on_one_device(tiny, length):
    tokens = np.random.default_rng(length).integers(0, 64, length)
    reader = LongPromptReader(tiny, mesh_of(3))
    logits, blocks = reader.read(tokens.tolist())
    x, cache = jax.jit(lambda tokens: tiny(tokens, tiny.init_cache(300)))(jnp.asarray(tokens, jnp.int32))
    np.testing.assert_allclose(logits, tiny.logits(x[-1:]), rtol=0, atol=3e-5)
    for pair, block in zip(blocks, cache.blocks, strict=True):
        for got, want in zip(pair, (block.k, block.v), strict=True):
            assert got.addressable_shards[0].data.shape[0] == len(got) / 3
            np.testing.assert_allclose(got[:length], want[:length], rtol=0, atol=3e-5)

    # One device goes on.
    step = jax.jit(lambda token, cache: tiny.logits(tiny(token, cache)[0]))
    token = jnp.asarray([11], jnp.int32)
    got = step(token, cache_of(tiny, length, blocks, 300))
    np.testing.assert_allclose(got, step(token, cache), rtol=0, atol=3e-5)


def test_the_program_of_a_prompt_gathers_nothing(tiny):
    program = LongPromptReader(tiny, mesh_of(3)).lower([0] * 200).compile()
    # In each block keys and values go on twice; the last token's activations are summed with zeros.
    assert collectives(program) == {"collective-permute": len(tiny.blocks) * 2 * 2, "all-reduce": 1}


def test_what_cannot_be_read(tiny):
    reader = LongPromptReader(tiny, mesh_of(2))
    with pytest.raises(ValueError, match="expected a prompt of at least one token; got none"):
        reader.read([])
    _, blocks = reader.read([1, 2, 3])
    with pytest.raises(ValueError, match="cache_of: expected max_length of 3 or more, for the prompt; got 2"):
        cache_of(tiny, 3, blocks, 2)
