"""Folders of Hugging Face's whose files say one thing in two ways, or two things."""

import jax.numpy as jnp
import numpy as np
import pytest

from models import llama
from models._errors import ModelFileError
from models.model_files import open_files

from . import families
from .families import LLAMA3
from .test_huggingface import write


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}}, {"rope_scaling": LLAMA3}),
        (
            {"rope_scaling": LLAMA3, "original_max_position_embeddings": 16},
            {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 16}},
        ),
        (
            {"rope_scaling": {name: value for name, value in LLAMA3.items() if not name.startswith("original")}},
            {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 256}},
        ),
    ],
)
def test_settings_of_the_rotary_embedding_as_transformers_takes_them(changes, same, tmp_path):
    """Llama 3's own length comes from the top level, from the scaling, or is that of the model."""
    configs = []
    for name, settings in (("one", changes), ("other", same), ("plain", {"rope_scaling": LLAMA3})):
        (tmp_path / name).mkdir()
        write(tmp_path / name, family="llama", **settings)
        configs.append(open_files(tmp_path / name)[0].config)
    assert configs[0] == configs[1]
    assert (configs[0] == configs[2]) == (same == {"rope_scaling": LLAMA3})


@pytest.mark.parametrize("window", [64, 255, "64", True, -0.5])
def test_a_window_that_a_llama_has(window, tmp_path):
    """It may be meant, and no layer would see it; one of the whole context or more changes nothing."""
    write(tmp_path, family="llama", sliding_window=window)
    with pytest.raises(ModelFileError, match=f"attention to all tokens; got a sliding window of {window}, which is n"):
        open_files(tmp_path)
    for family, harmless in (("llama", 256), ("llama", 0), ("llama", None), ("qwen2", window)):
        write(tmp_path, family=family, sliding_window=harmless)
        assert open_files(tmp_path)[0].config.context_length == 256


def test_an_output_that_is_not_the_embedding(tmp_path):
    """A fine-tuned model may have one, whatever its config says."""
    settings, weights = write(tmp_path, family="qwen2")
    tied = logits_of(tmp_path)
    embedding = weights["model.embed_tokens.weight"]
    for factor in (1, 2):
        families.write_folder(tmp_path, settings, weights | {"lm_head.weight": factor * embedding})
        np.testing.assert_allclose(logits_of(tmp_path), factor * tied, rtol=1e-5, atol=1e-6)


def logits_of(folder):
    model = llama.load(open_files(folder)[0])
    return model.logits(model(jnp.arange(5), model.init_cache(8))[0])
