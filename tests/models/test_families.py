"""Small random Llama, Qwen2 and Qwen3 models, from GGUF files and safetensors folders, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import gguf, huggingface, llama

from . import families


TOKENS = np.arange(40) * 7 % 80


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


@pytest.mark.parametrize("family", families.FAMILIES)
def test_gguf_files_and_folders(family, tmp_path):
    settings = families.settings_of(family)
    weights = families.random_weights(settings)
    file = gguf.open_model(families.write_gguf(tmp_path / "model.gguf", settings, weights))
    folder = huggingface.open_folder(families.write_folder(tmp_path / "folder", settings, weights))
    models = [llama.load(file), llama.load(folder)]
    np.testing.assert_allclose(file.config.rope_factors, folder.config.rope_factors, rtol=1e-6)
    for a, b in zip(*map(jax.tree.leaves, models), strict=True):
        np.testing.assert_array_equal(a, b)
    assert_computes(models[1], settings, weights)
    if file.config.rope_factors:
        assert_computes(models[0], settings, weights)
