"""Attention over a sequence that is split over devices, and a model whose text is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import eqxcallback as eqxc
from models import gguf, llama
from models.decoding.generator import Generator
from models.decoding.sampling import Sampling
from models.parallel.ring_attention import ring_attention
from models.parallel.sequence_parallel import SequenceLlama
from models.parallel.tensor_parallel import AXIS, bytes_per_device

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
    return {dtype: llama.load(gguf.open_model(path), dtype=jnp.dtype(dtype)) for dtype in ("float32", "bfloat16")}


@pytest.mark.parametrize(("count", "dtype", "bound"), [(3, "float32", 3e-5), (2, "bfloat16", 0.2)])
def test_logits_are_those_of_one_device(tiny, count, dtype, bound):
    """Parts of a text with and without padding, fewer tokens than devices, and single tokens, as each device has them in turn."""
    model = tiny[dtype]
    split = SequenceLlama(model, mesh_of(count))
    tokens = np.random.default_rng(0).integers(0, 64, 100).astype(np.int32)

    @jax.jit
    def read(model, tokens, cache, valid):
        x, cache = model(tokens, cache, valid)
        row = x if len(x) == 1 else jax.lax.dynamic_slice_in_dim(x, valid - 1, 1)
        return model.logits(row), cache

    caches, start = [model.init_cache(130), split.init_cache(130)], 0
    for size, valid in ((64, 50), (2, 2), (32, 32), (1, 1), (1, 1), (1, 1), (32, 9)):
        part = jnp.asarray(np.resize(tokens[start : start + valid], size))
        results = []
        for i, which in enumerate((model, split)):
            logits, caches[i] = read(which, part, caches[i], jnp.asarray(valid, jnp.int32))
            results.append(logits)
        np.testing.assert_allclose(results[1], results[0], rtol=0, atol=bound)
        start += valid
    assert caches[1].length == start
    k, want = (np.asarray(cache.blocks[1].k, np.float32) for cache in caches[::-1])
    k = k.reshape(count, -1, *k.shape[1:]).swapaxes(0, 1).reshape(k.shape)  # token t is on device t % count
    np.testing.assert_allclose(k[:start], want[:start], rtol=0, atol=bound)


@pytest.mark.parametrize("count", [4, 8])
def test_a_text_is_that_of_one_device_and_nothing_is_gathered(count, tiny):
    """Prompts of several chunks, of which the second has some tokens in common with the first text."""
    model = tiny["float32"]
    sampling = Sampling(0.8, top_k=30, repetition_penalty=1.2)
    first = np.random.default_rng(1).integers(0, 64, 700).tolist()
    prompts = [first, [*first[:333], *first[:99]]]
    models = model, SequenceLlama(model, mesh_of(count))
    generators = [Generator(which, room=900, sampling=sampling) for which in models]
    texts = [[list(generator.generate(prompt, max_tokens=20)) for prompt in prompts] for generator in generators]
    assert texts[0] == texts[1]
    reader = generators[1].reader
    assert generators[1].speed.kept_tokens == 333
    whole, part = (bytes_per_device(generator.reader.blocks) for generator in generators)
    assert part == pytest.approx(whole / count, rel=0.02)
    for size, program in reader._programs.items():
        rings = {
            "collective-permute": 2 * 2 * (count - 1),  # keys and values of two blocks, to each other device
            "all-reduce": 1,  # the last row
        }
        assert collectives(program) == (rings if size > 1 else {"all-reduce": 2 * 2})
        assert program.memory_analysis().alias_size_in_bytes == part  # the cache is updated in place
