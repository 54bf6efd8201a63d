"""The program `python -m models.finetune.merge`: what changes, what stays, and where it is written."""

import json
import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from models import adapter_files, llama, lora
from models.finetune import merge
from models.model_files import open_files

from . import families
from .test_families import TOKENS, logits
from .test_huggingface import byte_level
from .test_llama_files import random_adapters
from .tiny import write_tiny


def source(kind, path):
    """A model whose weights are of several encodings, or all in bf16."""
    if kind == "gguf":
        encodings = {"attn_k": "Q4_1", "attn_v": "Q4_1", "ffn_down": "F16", "token_embd": "Q5_0"}
        write_tiny(path, encodings, speaks=True)
        return path
    settings = families.settings_of("qwen3", vocab_size=272, torch_dtype="bfloat16")
    families.write_folder(path, settings, families.random_weights(settings), dtype="bfloat16")
    byte_level().save(str(path / "tokenizer.json"))
    return path


def merged(path, adapters, output, *options):
    """The tensors of a model that the program has written."""
    adapter_files.save(output.parent / "adapter", adapters, alpha=1.0)
    arguments = [str(output.parent / "adapter"), "--weights", str(path), "--output", str(output), *options]
    assert merge.main(arguments) == 0
    return open_files(output)[0]


def halves_from_pairs(rows, heads):
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.parametrize("encoding", ["F32", "BF16"])
@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_weights_that_no_adapter_changes_stay_bit_by_bit(kind, encoding, tmp_path):
    """Also those that are one layer with the weights that change. These are rounded once."""
    path = source(kind, tmp_path / "source")
    file, _ = open_files(path)
    adapters = random_adapters(file.config, ["q_proj", "down_proj"])
    again = merged(path, adapters, tmp_path / "merged", "--encoding", encoding)
    changed = {f"blk.{i}.{layer}.weight" for i in range(2) for layer in ("attn_q", "ffn_down")}
    assert again.tensors.keys() == file.tensors.keys()
    for name, tensor in again.tensors.items():
        if name in changed:
            assert tensor.encoding == encoding
        else:
            assert tensor.encoding == file.tensors[name].encoding
            assert tensor.data.tobytes() == file.tensors[name].data.tobytes()
    update = adapters.blocks[0]["qkv"].updates["q_proj"]
    weight, got = (np.float32(each.tensors["blk.0.attn_q.weight"].data) for each in (file, again))
    if file.rotates_neighbours:
        weight, got = (halves_from_pairs(rows, file.config.num_heads) for rows in (weight, got))
    exact = weight.astype(np.float64) + 0.5 * (np.asarray(update.b, np.float64) @ np.asarray(update.a, np.float64))
    if encoding == "F32":
        np.testing.assert_allclose(got, exact, rtol=0, atol=1e-6)
    else:
        nearest = exact.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
        assert (got != nearest).mean() < 1e-3  # where f32 rounds otherwise than f64


@pytest.mark.parametrize(("encoding", "dtype"), [("F32", "float32"), ("BF16", "bfloat16")])
def test_a_folder_names_the_dtype_that_holds_its_weights(encoding, dtype, tmp_path):
    path = source("folder", tmp_path / "source")
    adapters = random_adapters(open_files(path)[0].config, ["up_proj"])
    merged(path, adapters, tmp_path / "merged", "--encoding", encoding)
    assert json.loads((tmp_path / "merged/config.json").read_text())["torch_dtype"] == dtype


@pytest.mark.parametrize(("kind", "encoding"), [("folder", "F32"), ("gguf", "F32"), ("gguf", "Q8_0")])
def test_programs_compute_with_it_as_with_the_adapter(kind, encoding, tmp_path):
    path = source(kind, tmp_path / "source")
    file, _ = open_files(path)
    adapters = random_adapters(file.config, ["q_proj", "v_proj", "gate_proj"])
    again = merged(path, adapters, tmp_path / "merged", "--encoding", encoding)
    model, tokens = llama.load(file), jnp.asarray(TOKENS, jnp.int32)
    expected, got = logits(lora.attach(model, adapters), tokens), logits(llama.load(again), tokens)
    off = np.abs(got - expected).max() / np.abs(logits(model, tokens) - expected).max()
    assert off < (1e-4 if encoding == "F32" else 0.1)


def test_a_folder_of_something_else_is_refused_before_anything_is_loaded(tmp_path, capsys, monkeypatch):
    path = source("folder", tmp_path / "source")
    adapter_files.save(tmp_path / "adapter", random_adapters(open_files(path)[0].config), alpha=1.0)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/chat_template.jinja").write_text("of another model")
    monkeypatch.setattr("models.llama.load", lambda *_, **__: pytest.fail("the model was loaded"))
    arguments = [str(tmp_path / "adapter"), "--weights", str(path), "--output", str(tmp_path / "other")]
    assert merge.main(arguments) == 2
    message = (
        r"finetune\.merge: error: --output: expected a folder that is new or empty, or that of the model; got .*/other "
        r"with chat_template\.jinja in it\. Pass another folder\.\n"
    )
    assert re.fullmatch(message, capsys.readouterr().err)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["chat_template.jinja"]
