"""Keys and values in another dtype than the activations: what it changes, and the option of the programs."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import gguf, llama
from models._program import CACHE_DTYPES
from models.decoding.answer import Answer
from models.decoding.batch import Batch, Request
from models.decoding.generator import Generator
from models.generate.__main__ import main
from models.parallel import tensor_parallel
from models.parallel.sequence_parallel import SequenceLlama
from models.serve.__main__ import main as serve
from models.tokens.tokenizer import Tokenizer

from .test_activations import logits_of
from .test_generator import tokens_of
from .tiny import write_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny(path, other="Q4_1", context=300, hidden=128, speaks=True)
    return gguf.open_model(path)


@pytest.fixture(scope="module")
def tokenizer_of_bytes(tiny):
    return Tokenizer(tiny.metadata)


# Of what a value is rounded to: half of the last bit of f16 and bf16, and of a 127th of the largest one of a row.
@pytest.mark.parametrize(("name", "error"), [("f16", 2**-11), ("bf16", 2**-8), ("int8", 1 / 254)])
def test_real_weights(name, error, model, tokenizer):
    """Logits of five layers differ by about as much as the keys and values do."""
    short = dataclasses.replace(model, blocks=model.blocks[:5], config=dataclasses.replace(model.config, num_layers=5))
    rounding = dataclasses.replace(short, cache_dtype=jnp.dtype(CACHE_DTYPES[name]))
    assert {cache.k.dtype for cache in rounding.init_cache(8).blocks} == {jnp.dtype(CACHE_DTYPES[name])}
    tokens = jnp.asarray(tokenizer.encode("Nobody knows how many scrolls there were in the library of Alexandria."))
    want, got = (np.asarray(logits_of(which, tokens)) for which in (short, rounding))
    differs = np.sqrt(np.mean((got - want) ** 2)) / want.std()
    assert error / 20 < differs < 4 * error


@pytest.mark.parametrize("name", ["f16", "int8"])
def test_rows_and_guesses_say_what_one_row_says(name, tiny, tokenizer_of_bytes):
    model = llama.load(tiny, cache_dtype=CACHE_DTYPES[name], packed=True)
    prompts = [tokens_of(0, 70), tokens_of(5, 9), tokens_of(9, 33)]

    def texts(generator):
        for prompt in prompts:
            answer = Answer(tokenizer_of_bytes)
            answer.take(generator.generate(prompt, max_tokens=20), str, max_tokens=20)
            yield answer.text

    alone = list(texts(Generator(model, room=128)))
    assert list(texts(Generator(model, room=128, lookup=True))) == alone
    requests = [Request(prompt, Answer(tokenizer_of_bytes), max_tokens=20) for prompt in prompts]
    batch = Batch(model, widths=[2], room=128)
    for request in requests:
        batch.add(request)
    collections.deque(batch.run(), maxlen=0)
    assert [request.answer.text for request in requests] == alone


def test_several_devices(tiny):
    tokens = jnp.asarray([1, 17, 5, 60, 33, 2, 9], jnp.int32)
    model = llama.load(tiny, cache_dtype="int8")
    split = tensor_parallel.load(tiny, tensor_parallel.mesh_of(jax.devices()[:2]), cache_dtype="int8")
    assert split.init_cache(8).blocks[0].k.dtype == jnp.int8
    np.testing.assert_allclose(logits_of(split, tokens), logits_of(model, tokens), rtol=1e-3, atol=1e-3)
    striped = SequenceLlama(model, tensor_parallel.mesh_of(jax.devices()[:2]))
    assert striped.init_cache(8).blocks[0].k.dtype == jnp.float32


def test_the_program(capsys):
    assert main(["Name the capital of Japan.", "--cache", "int8", "--profile"]) == 0
    written = capsys.readouterr()
    assert written.out == "The capital of Japan is Tokyo.\n"
    assert "attention" in written.err


def test_wrong_options(capsys):
    for program, arguments in ((main, ["hi"]), (serve, [])):
        assert program([*arguments, "--cache", "int4"]) == 2
        assert "argument --cache: invalid choice: 'int4'" in capsys.readouterr().err
    assert main(["hi", "--cache", "f16", "--devices", "2", "--split", "sequence"]) == 2
    assert "expected --cache with --split model; got sequence" in capsys.readouterr().err
