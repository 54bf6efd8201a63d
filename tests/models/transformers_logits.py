"""Logits that Hugging Face's transformers computes for the models of `families.py`, in a file that tests without PyTorch read.

`python -m tests.models.transformers_logits` writes the file anew. It needs PyTorch and transformers: `make torch` has them.
"""

import importlib
import pathlib
import tempfile
from typing import Any

import numpy as np

from . import families


PATH = pathlib.Path(__file__).with_suffix(".npz")
TOKENS = np.arange(40) * 7 % 80
POSITIONS = [0, 1, 5, 23, 24, 39]
BIASES = {"attention_bias": True, "head_dim": 24}
MODELS = {
    **{family: families.settings_of(family) for family in families.FAMILIES},
    "llama with biases": families.settings_of("llama", mlp_bias=True, **BIASES),
    "qwen3 with biases": families.settings_of("qwen3", **BIASES),
}
"""The settings of each model, whose weights are `families.random_weights` of them."""


def assert_are_those_of_transformers(logits, name):
    """Compare logits of all positions, in f32, with those that the file has."""
    with np.load(PATH) as file:
        theirs = file[name]
    np.testing.assert_allclose(np.asarray(logits)[POSITIONS], theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


def computed(settings):
    """Return what transformers computes now, at `POSITIONS`."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    with tempfile.TemporaryDirectory() as folder:
        families.write_folder(pathlib.Path(folder), settings, families.random_weights(settings))
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            return model(torch.as_tensor(TOKENS[None])).logits[0].numpy()[POSITIONS]


if __name__ == "__main__":
    np.savez_compressed(PATH, allow_pickle=False, **{name: computed(settings) for name, settings in MODELS.items()})
