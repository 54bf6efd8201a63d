"""Small random Llama, Qwen2 and Qwen3 models, from GGUF files and safetensors folders, against NumPy and transformers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

import eqxcallback as eqxc
from models import gguf, huggingface, llama
from models.decoding.answer import Answer
from models.decoding.batch import Batch, Request
from models.decoding.generator import Generator
from models.tokens.chat_template import ChatTemplate
from models.tokens.tokenizer import Tokenizer
from models.tokens.vocabulary import Vocabulary

from . import families
from .transformers_logits import MODELS, TOKENS, assert_are_those_of_transformers


Q8_0 = GGMLQuantizationType.Q8_0


@jax.jit
def logits(model, tokens):
    """Return the logits of a prompt of 24 tokens, then of one token after the other."""
    x, cache = model(tokens[:24], model.init_cache(len(tokens)))

    def step(cache, token):
        x, cache = model(token[None], cache)
        return cache, model.logits(x)[0]

    return jnp.concatenate([model.logits(x), jax.lax.scan(step, cache, tokens[24:])[1]])


def assert_computes(model, settings, weights, atol=1e-4):
    ours = logits(model, jnp.asarray(TOKENS, jnp.int32))
    theirs = families.logits(settings, weights, TOKENS)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)
    assert np.abs(theirs).mean() > 10 * atol
    return ours


@pytest.mark.parametrize("family", families.FAMILIES)
def test_gguf_files_and_folders(family, tmp_path):
    settings = MODELS[family]
    weights = families.random_weights(settings)
    file = gguf.open_model(families.write_gguf(tmp_path / "model.gguf", settings, weights))
    folder = huggingface.open_folder(families.write_folder(tmp_path / "folder", settings, weights))
    models = [llama.load(file), llama.load(folder)]
    np.testing.assert_allclose(file.config.rope_factors, folder.config.rope_factors, rtol=1e-6)
    for a, b in zip(*map(jax.tree.leaves, models), strict=True):
        np.testing.assert_array_equal(a, b)
    assert_are_those_of_transformers(assert_computes(models[1], settings, weights), family)
    if file.config.rope_factors:
        assert_are_those_of_transformers(assert_computes(models[0], settings, weights), family)


@pytest.mark.parametrize(("dtype", "files"), [("float16", 1), ("bfloat16", 3)])
def test_weights_of_16_bits(dtype, files, tmp_path):
    """In several files, too. They are f32 where activations are."""
    settings = families.settings_of("qwen2", tie_word_embeddings=False)
    weights = families.random_weights(settings)
    rounded = {name: weight.astype(families.DTYPES[dtype]) for name, weight in weights.items()}
    folder = huggingface.open_folder(families.write_folder(tmp_path, settings, weights, dtype=dtype, files=files))
    model = llama.load(folder)
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype("float32")}
    assert_computes(model, settings, rounded)


def test_bfloat16(tmp_path):
    """Weights stay as they are. Norms have f32 in GGUF files."""
    settings = families.settings_of("qwen3")
    weights = families.random_weights(settings)
    weights = {name: weight.astype(jnp.bfloat16).astype(np.float32) for name, weight in weights.items()}
    folder = huggingface.open_folder(families.write_folder(tmp_path / "folder", settings, weights, dtype="bfloat16"))
    file = gguf.open_model(families.write_gguf(tmp_path / "model.gguf", settings, weights, encoding="BF16"))
    assert file.tensors["blk.1.ffn_up.weight"].encoding == "BF16"
    model = llama.load(file, dtype=jnp.bfloat16)
    of_folder = llama.load(folder, dtype=jnp.bfloat16)
    for a, b in zip(*map(jax.tree.leaves, (model, of_folder)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    layer = model.blocks[0].attention_out.layers[0]
    assert isinstance(layer, eqx.nn.Linear)
    stored = weights["model.layers.0.self_attn.o_proj.weight"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(layer.weight, stored)
    ours = logits(model, jnp.asarray(TOKENS, jnp.int32))
    theirs = families.logits(settings, weights, TOKENS)
    assert np.sqrt(np.mean((ours - theirs) ** 2)) < 0.05 * np.std(theirs)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_all_biases_that_a_config_may_ask_for(family, tmp_path):
    settings = MODELS[f"{family} with biases"]
    weights = families.random_weights(settings)
    assert len([name for name in weights if name.endswith(".bias")]) == 2 * (7 if family == "llama" else 4)
    folder = huggingface.open_folder(families.write_folder(tmp_path, settings, weights))
    model = llama.load(folder)
    if family == "llama":
        file = gguf.open_model(families.write_gguf(tmp_path / "model.gguf", settings, weights))
        assert file.config.biases == folder.config.biases
        for a, b in zip(*map(jax.tree.leaves, (llama.load(file), model)), strict=True):
            np.testing.assert_array_equal(a, b)
    ours = assert_computes(model, settings, weights)
    assert_are_those_of_transformers(ours, f"{family} with biases")


def test_quantised_weights_with_biases(tmp_path):
    """Queries, keys and values are one layer, with one bias."""
    settings = families.settings_of("qwen2")
    weights = families.random_weights(settings)
    path = families.write_gguf(tmp_path / "model.gguf", settings, weights, encoding="Q8_0")
    model = llama.load(gguf.open_model(path))
    (layer,) = model.blocks[0].qkv.layers
    assert isinstance(layer, eqxc.nn.QuantizedLinear)
    decoded = {
        name: weight if weight.ndim == 1 else dequantize(quantize(weight, Q8_0), Q8_0)
        for name, weight in weights.items()
    }
    assert_computes(model, settings, decoded, atol=2e-4)


def test_what_a_folder_may_have_besides(tmp_path):
    """Settings of transformers 5, a copy of the embedding for the output, and old files' frequencies."""
    settings = families.settings_of("llama3")
    weights = families.random_weights(settings)
    extra = {"lm_head.weight": weights["model.embed_tokens.weight"]}
    extra |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32) for i in range(2)}
    new = dict(settings, rope_parameters={**settings["rope_scaling"], "rope_theta": settings["rope_theta"]})
    del new["rope_scaling"], new["rope_theta"]
    config = huggingface.open_folder(families.write_folder(tmp_path / "old", settings, weights)).config
    folder = huggingface.open_folder(families.write_folder(tmp_path / "new", new, weights | extra))
    assert folder.config == config
    assert "output.weight" not in folder.tensors


def test_several_rows_at_a_time(tmp_path):
    """Norms of heads and biases under `vmap`, as answers to many prompts have them."""
    settings = families.settings_of("qwen3", attention_bias=True)
    folder = families.write_folder(tmp_path, settings, families.random_weights(settings))
    model = llama.load(huggingface.open_folder(folder))
    prompts = [TOKENS[i : i + 5].tolist() for i in range(3)]

    # Texts that say which tokens they are.
    template = ChatTemplate("", "a template", {})
    tokenizer = Tokenizer(Vocabulary(80, {}, lambda *_: [], lambda token: b" %d" % token, frozenset(), template))
    answers = [Answer(tokenizer) for _ in prompts]
    batch = Batch(model, widths=[2], room=32)
    for prompt, answer in zip(prompts, answers, strict=True):
        batch.add(Request(prompt, answer, 6))
    list(batch.run())
    generator = Generator(model, room=32)
    alone = [list(generator.generate(prompt, max_tokens=6)) for prompt in prompts]
    assert [[*map(int, answer.text.split())] for answer in answers] == alone
