"""SmolLM2-135M-Instruct through our layers, against plain JAX on the dequantised weights."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from benchmarks import plain_llama
from models import gguf, llama
from models.decoding.generator import Generator
from models.decoding.sampling import Sampling

from .tiny import write_tiny


TEXT = (
    "The library of Alexandria was one of the largest of the ancient world. It is said that ships which came to the harbour "
    "had to hand over their books, so that copies could be made; the copies went back to the ships, and the originals stayed. "
    "Nobody knows how many scrolls there were: 40,000, or 400,000? What burned, and when, is told in many ways. Caesar set fire "
    "to ships in the year 48 BC, and the fire spread to stores near the docks, in which there may have been books; but scholars "
    "worked there for centuries after that day."
)


@pytest.fixture(scope="module")
def plain():
    return plain_llama.load(gguf.default_path())


def prompt(tokenizer, text="What is the capital of France?"):
    return tokenizer.encode_chat([{"role": "user", "content": text}])


def generated(model, tokens, max_tokens, **options):
    generator = Generator(model, room=len(tokens) + max_tokens, **options)
    return list(generator.generate(tokens, max_tokens=max_tokens))


@jax.jit
def prompt_logits(model, tokens):
    x, _ = model(tokens, model.init_cache(len(tokens)))
    return model.logits(x)


def test_logits_of_a_prompt(isa, file, tokenizer, model, plain):
    tokens = jnp.asarray(tokenizer.encode(TEXT)[:100], jnp.int32)
    assert len(tokens) == 100
    theirs = plain_llama.logits(plain, file.config, tokens)
    np.testing.assert_allclose(prompt_logits(model, tokens), theirs, rtol=0, atol=2e-3)


def test_packed_weights_give_the_same_answers(file, tokenizer, model):
    packed = llama.load(file, packed=True)
    encodings = {getattr(layer, "encoding", None) for block in packed.blocks for layer in block.gate_up.layers}
    assert encodings == {"Q4_1_R16"}
    assert packed.output is None  # it is the embedding's
    assert getattr(packed.embedding.table, "encoding", None) == "Q8_0_R16"
    for text in ("What is the capital of France?", "Name three rivers of Asia.", TEXT):
        tokens = prompt(tokenizer, text)
        assert generated(packed, tokens, 24) == generated(model, tokens, 24)


@jax.jit
def logits_in_steps(model, tokens):
    """Return the logits of a prompt of 60 tokens, then of one token after the other."""
    x, cache = model(tokens[:60], model.init_cache(len(tokens)))

    def step(cache, token):
        x, cache = model(token[None], cache)
        return cache, model.logits(x)[0]

    return jnp.concatenate([model.logits(x), jax.lax.scan(step, cache, tokens[60:])[1]])


def test_logits_of_one_token_after_the_other(isa, file, tokenizer, model, plain):
    tokens = jnp.asarray(tokenizer.encode(TEXT)[:100], jnp.int32)
    theirs = plain_llama.logits(plain, file.config, tokens)
    np.testing.assert_allclose(logits_in_steps(model, tokens), theirs, rtol=0, atol=2e-3)


@pytest.mark.parametrize("text", ["What is the capital of France?", "Write a poem about the sea.", TEXT])
def test_greedy_text_is_the_same(text, file, tokenizer, model, plain):
    tokens = prompt(tokenizer, text)
    ours = generated(model, tokens, 50)
    assert ours == plain_llama.generate(plain, file.config, jnp.asarray(tokens, jnp.int32), 50)


def test_the_answer(tokenizer, model):
    tokens = generated(model, prompt(tokenizer), 20)
    assert "Paris" in tokenizer.decode(tokens)


def test_bfloat16(file, tokenizer, plain):
    model = llama.load(file, dtype=jnp.bfloat16)
    tokens = jnp.asarray(tokenizer.encode(TEXT)[:100], jnp.int32)
    theirs = plain_llama.logits(plain, file.config, tokens)
    # Not of what it generates: the best two tokens are often nearer to each other than bf16 tells apart.
    for logits in (prompt_logits, logits_in_steps):
        ours = logits(model, tokens)
        # A residual stream of 8 bits, 60 additions deep; the logits are up to 40.
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2.5)
        assert np.mean(np.argmax(ours, -1) == np.argmax(theirs, -1)) > 0.9


# Encodings of: the embedding, the output (none: the embedding's), queries, keys, values, and everything else.
@pytest.mark.parametrize(
    "encodings",
    [
        ("F32", None, "F32", "F32", "F32", "F32"),
        ("F16", "Q8_0", "Q4_1", "Q8_0", "Q8_0", "F16"),
        ("Q8_0", "F32", *4 * ["Q8_0"]),
    ],
)
def test_other_encodings(encodings, tmp_path):
    path = tmp_path / "tiny.gguf"
    embedding, output, query, key, value, other = encodings
    write_tiny(
        path, {"token_embd": embedding, "output": output, "attn_q": query, "attn_k": key, "attn_v": value}, other
    )
    file = gguf.open_model(path)
    tokens = jnp.asarray(np.arange(17) * 5 % 64, jnp.int32)
    theirs = plain_llama.logits(plain_llama.load(path), file.config, tokens)
    np.testing.assert_allclose(prompt_logits(llama.load(file), tokens), theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("encoding", ["Q4_0", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
def test_encodings_of_other_files(encoding, tmp_path):
    """Q4_K_M files have Q6_K as well. The embedding is taken row by row, and is the output, too."""
    path = tmp_path / "tiny.gguf"
    write_tiny(path, {"output": None, "attn_v": "Q6_K"}, encoding, width=256)
    file = gguf.open_model(path)
    model = llama.load(file)
    assert isinstance(model.embedding.table, eqxc.nn.QuantizedLinear)
    assert model.embedding.table.encoding == encoding
    tokens = jnp.asarray(np.arange(17) * 5 % 64, jnp.int32)
    theirs = plain_llama.logits(plain_llama.load(path), file.config, tokens)
    np.testing.assert_allclose(prompt_logits(model, tokens), theirs, rtol=0, atol=2e-4 * np.abs(theirs).max())


def test_padding_changes_nothing(tokenizer, model):
    tokens = jnp.asarray(prompt(tokenizer), jnp.int32)
    padded = jnp.concatenate([tokens, jnp.full(27, 7, jnp.int32)])

    @jax.jit
    def two(model, tokens, count):
        x, cache = model(tokens, model.init_cache(128), count)
        y, cache = model(tokens[:1], cache)
        return model.logits(x)[count - 1], model.logits(y), cache.length

    whole, longer = two(model, tokens, len(tokens)), two(model, padded, len(tokens))
    for a, b in zip(whole, longer, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)


def test_sampling_repeats_with_its_seed(tokenizer, model):
    tokens = prompt(tokenizer, "Tell me a story.")

    def run(seed, **options):
        return generated(
            model, tokens, 12, seed=seed, sampling=Sampling(**{"temperature": 1.0, "top_p": 0.9, **options})
        )

    assert run(0) == run(0)
    assert run(0) != run(1)
    assert run(0, top_p=1e-6) == generated(model, tokens, 12)


def step_program(model, max_length):
    def step(model, token, cache):
        x, cache = model(token[None], cache)
        return model.logits(x), cache

    arguments = (model, jax.ShapeDtypeStruct((), jnp.int32), jax.eval_shape(lambda: model.init_cache(max_length)))
    return jax.jit(step, donate_argnums=2).lower(*arguments).compile()


def test_the_cache_is_not_copied(model):
    length = 4096
    program = step_program(model, length)
    text = program.as_text() or ""
    cache_type = f"f32[{length},3,64]"
    copies = [line for line in text.splitlines() if re.search(r"= \S+ copy\(", line) and cache_type in line]
    assert copies == []
    # Other ways to copy: anything but our calls, and what passes them on, that makes an array of that type.
    makers = set(re.findall(rf"= {re.escape(cache_type)}\S* ([\w-]+)\(", text))
    assert makers == {"parameter", "get-tuple-element"}  # our call has several results
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 1_000_000  # one layer's cache has 6 MB
    assert memory.alias_size_in_bytes >= 60 * length * 3 * 64 * 4


def test_the_cache_stays_where_it_is(model):
    cache = jax.block_until_ready(model.init_cache(256))
    program = step_program(model, 256)
    where = [array.unsafe_buffer_pointer() for layer in cache.blocks for array in (layer.k, layer.v)]
    for _ in range(3):
        _, cache = program(model, np.int32(5), cache)
    assert [array.unsafe_buffer_pointer() for layer in cache.blocks for array in (layer.k, layer.v)] == where
    assert int(cache.length) == 3


def test_weights_are_not_expanded(model):
    program = step_program(model, 256)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    assert weights < 100_000_000
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.argument_size_in_bytes < weights + 25_000_000
    assert not re.search(r"f32\[(576|960|1536|3072|49152),(576|1536)\]", program.as_text() or "")
