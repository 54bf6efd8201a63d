"""A model whose blocks have ring buffers: its text is that of caches with all tokens, of which each token sees a window."""

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from models import gguf, llama
from models._program import CACHE_DTYPES
from models.decoding.answer import Answer
from models.decoding.batch import Batch, Request
from models.decoding.generator import Generator
from models.tokens.tokenizer import Tokenizer

from .test_generator import tokens_of
from .tiny import write_tiny


WINDOW, ROOM = 13, 290


class MaskedCache(eqxc.nn.KVCache):
    """A cache of all tokens, each of which sees a window."""

    def attend(self, q, **options):  # `update` calls it, too
        return super().attend(q, **{**options, "window": WINDOW})


def ring(*args):
    return eqxc.nn.KVCache(*args, window=WINDOW)


class WithCaches(llama.Llama):
    """A Llama with other caches."""

    cache: Callable[..., eqxc.nn.KVCache] = eqx.field(static=True, default=eqxc.nn.KVCache)

    def init_cache(self, max_length):
        config, dtype = self.config, self.dtype if self.cache_dtype is None else self.cache_dtype
        blocks = [self.cache(max_length, config.num_kv_heads, config.head_size, dtype) for _ in self.blocks]
        return llama.Cache([llama.with_length(block, None) for block in blocks], jnp.zeros((), jnp.int32))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny(path, context=300, hidden=128, speaks=True)
    return gguf.open_model(path)


@pytest.fixture(params=["f32", "int8"])
def models(request, tiny):
    """The model with ring buffers, with masks, and with neither."""
    model = llama.load(tiny, cache_dtype=CACHE_DTYPES[request.param])
    fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    return [WithCaches(**fields, cache=cache) for cache in (ring, MaskedCache, eqxc.nn.KVCache)]


# Of less than a window, of a few windows, and of a chunk and some tokens more.
@pytest.mark.parametrize("length", [5, 60, 200])
def test_a_text_is_longer_than_the_window(models, length):
    ringed, masked, whole = (
        list(Generator(model, room=ROOM).generate(tokens_of(0, length), max_tokens=4 * WINDOW)) for model in models
    )
    assert len(ringed) == 4 * WINDOW
    assert ringed == masked
    assert ringed != whole


def test_a_batch(models, tiny):
    tokenizer = Tokenizer(tiny.metadata)
    records = []
    for model in models:
        answers = [Answer(tokenizer) for _ in range(3)]
        batch = Batch(model, widths=[2], room=ROOM)
        for answer, start, length in zip(answers, (0, 3, 7), (90, 5, 30), strict=True):
            batch.add(Request(tokens_of(start, length), answer, 4 * WINDOW))
        assert len(list(batch.run())) == 3
        records.append([answer.record() for answer in answers])
    assert records[0] == records[1]
    assert records[0] != records[2]


def test_a_ring_has_as_many_entries_as_the_window(models):
    shapes = [{block.k.shape[0] for block in model.init_cache(ROOM).blocks} for model in models]
    assert shapes == [{WINDOW}, {ROOM}, {ROOM}]


@pytest.mark.parametrize("count", [2, llama.FEW_TOKENS])
def test_a_few_tokens_at_a_time(models, count):
    """Each of them sees tokens that the later ones overwrite in a ring buffer."""
    tokens = jnp.asarray(tokens_of(0, 10 * count), jnp.int32).reshape(10, count)
    results = []
    for model in models[:2]:
        read, cache = jax.jit(lambda model, *args: model(*args)), model.init_cache(ROOM)
        for few in tokens:
            x, cache = read(model, few, cache)
            results.append(jax.jit(lambda model, x: model.logits(x))(model, x))
    ringed, masked = np.split(np.stack(results), 2)
    np.testing.assert_allclose(ringed, masked, rtol=1e-4, atol=1e-4)
