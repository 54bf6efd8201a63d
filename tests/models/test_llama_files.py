"""A Llama written to files of the kind that it came from, and read again, by us and by others."""

import dataclasses
import filecmp
import json
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import adapter_files, gguf, huggingface, llama, llama_files, lora
from models.finetune import merge
from models.model_files import open_files

from . import families
from .test_families import TOKENS, logits
from .test_huggingface import write as write_folder
from .tiny import write_tiny
from .transformers_logits import MODELS


def assert_same_bits(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def written(path, model, file) -> Any:
    """The file of a model, opened."""
    llama_files.save(path, model, file)
    return huggingface.open_folder(path) if path.is_dir() else gguf.open_model(path)


def random_adapters(config, targets=lora.TARGETS):
    adapters = lora.init(config, rank=2, scale=0.5, targets=targets, key=jax.random.key(0))
    leaves, tree = jax.tree.flatten(adapters)
    rng = np.random.default_rng(0)
    return tree.unflatten([jnp.asarray(rng.normal(scale=0.1, size=leaf.shape), jnp.float32) for leaf in leaves])


FIELDS = {"add_custom_alignment": 64, "add_file_type": 0, "add_tags": ["small", "random"]}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("family", [*families.FAMILIES, "llama with biases"])
def test_there_and_back(family, dtype, tmp_path):
    settings = MODELS[family]
    weights = families.random_weights(settings)
    files = {
        "model.gguf": gguf.open_model(families.write_gguf(tmp_path / "source.gguf", settings, weights, fields=FIELDS)),
        "folder": huggingface.open_folder(families.write_folder(tmp_path / "source", settings, weights)),
    }
    for name, file in files.items():
        model = llama.load(file, dtype=dtype)
        again = written(tmp_path / name, model, file)
        assert again.config == file.config
        if isinstance(file, gguf.ModelFile):
            assert again.metadata | {"general.file_type": 0} == file.metadata
            assert ("general.file_type" in again.metadata) == (dtype == jnp.float32)  # which says that all are F32
        assert_same_bits(llama.load(again, dtype=dtype), model)
        assert_same_bits(llama.load(written(tmp_path / name, model, again), dtype=dtype), model)  # in place
        if dtype == jnp.float32:
            assert again.tensors.keys() == file.tensors.keys()
            for tensor, theirs in ((again.tensors[name], file.tensors[name]) for name in file.tensors):
                assert tensor.encoding == theirs.encoding == "F32"
                np.testing.assert_array_equal(tensor.data, theirs.data)


@pytest.mark.parametrize("encoding", ["BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_every_encoding(encoding, tmp_path):
    write_tiny(tmp_path / "source.gguf", other=encoding, width=256)
    file = gguf.open_model(tmp_path / "source.gguf")
    for packed in (False, True):
        model = llama.load(file, dtype=jnp.bfloat16, packed=packed)
        again = written(tmp_path / "model.gguf", model, file)
        for name, tensor in file.tensors.items():
            assert tensor.encoding == again.tensors[name].encoding == ("F32" if "norm" in name else encoding)
            np.testing.assert_array_equal(again.tensors[name].data, tensor.data)
        assert_same_bits(llama.load(again, dtype=jnp.bfloat16, packed=packed), model)


def test_the_real_model(file, model, tmp_path):
    """Tensors and metadata are those of the published file, also from weights that are packed."""
    for name, ours in (("plain", model), ("packed", llama.load(file, packed=True))):
        path = tmp_path / name
        again = written(path, ours, file)
        assert list(again.metadata) == list(file.metadata)
        assert again.types == file.types
        for key, value in file.metadata.items():
            np.testing.assert_array_equal(again.metadata[key], value)
        assert again.tensors.keys() == file.tensors.keys()
        for key, tensor in file.tensors.items():
            assert (again.tensors[key].encoding, again.tensors[key].shape) == (tensor.encoding, tensor.shape)
            np.testing.assert_array_equal(again.tensors[key].data, tensor.data)
    assert filecmp.cmp(tmp_path / "plain", tmp_path / "packed", shallow=False)


@pytest.mark.parametrize("encoding", [None, "Q8_0"])
def test_merged_adapters(encoding, tmp_path):
    """Parts of a projection have several encodings before, and one afterwards."""
    encodings = {"attn_q": "Q8_0", "attn_k": "Q4_1", "attn_v": "Q4_1", "token_embd": "Q5_0", "ffn_down": "F16"}
    write_tiny(tmp_path / "source.gguf", encodings=encodings)
    file = gguf.open_model(tmp_path / "source.gguf")
    model = llama.load(file)
    tuned = lora.attach(model, random_adapters(file.config))
    merged = lora.merge(tuned, encoding=encoding)
    again = written(tmp_path / "merged.gguf", merged, file)
    loaded = llama.load(again)
    assert {again.tensors[f"blk.0.attn_{part}.weight"].encoding for part in "qkv"} == {encoding or "F32"}
    assert again.tensors["token_embd.weight"].encoding == "Q5_0"
    assert again.metadata["general.quantization_version"] == 2
    tokens = jnp.asarray(TOKENS % 64, jnp.int32)
    np.testing.assert_array_equal(logits(loaded, tokens), logits(merged, tokens))
    assert np.abs(logits(loaded, tokens) - logits(model, tokens)).max() > 0.1
    if encoding is None:
        np.testing.assert_allclose(logits(loaded, tokens), logits(tuned, tokens), atol=1e-4)
    with pytest.raises(
        ValueError, match=r"expected a model on one device, without adapters .*Call models\.lora\.merge"
    ):
        llama_files.save(tmp_path / "tuned.gguf", tuned, file)


def test_a_folder_keeps_its_tokenizer_and_says_its_dtype(tmp_path):
    settings = families.settings_of("qwen2", torch_dtype="bfloat16")
    weights = families.random_weights(settings)
    file = huggingface.open_folder(families.write_folder(tmp_path / "source", settings, weights, dtype="bfloat16"))
    (tmp_path / "source/tokenizer.json").write_text("{}")
    (tmp_path / "source/notes.txt").write_text("not of the model")
    model = llama.load(file)
    merged = lora.merge(lora.attach(model, random_adapters(file.config, ["q_proj"])))
    again = written(tmp_path / "merged", merged, file)
    tokens = jnp.asarray(TOKENS, jnp.int32)
    np.testing.assert_array_equal(logits(llama.load(again), tokens), logits(merged, tokens))
    assert sorted(path.name for path in (tmp_path / "merged").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert '"torch_dtype": "float32"' in (tmp_path / "merged/config.json").read_text()
    quantised = lora.merge(lora.attach(model, random_adapters(file.config)), encoding="Q8_0")
    with pytest.raises(
        ValueError, match=r"not quantised, for a folder .*; got blk\.0\.attn_q\.weight of Q8_0\. Use a GGUF"
    ):
        llama_files.save(tmp_path / "no", quantised, file)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_a_full_disk_is_an_error_of_the_system_and_the_old_file_stays(kind, tmp_path, full_disk):
    settings = families.settings_of("qwen3")
    weights = families.random_weights(settings)
    if kind == "gguf":
        path = source = families.write_gguf(tmp_path / "source.gguf", settings, weights)
        file = gguf.open_model(source)
    else:
        path = families.write_folder(tmp_path / "source", settings, weights)
        source, file = path / "model.safetensors", huggingface.open_folder(path)
    model, before = llama.load(file), source.read_bytes()
    with full_disk(), pytest.raises(OSError, match="File too large"):
        llama_files.save(path, model, file)
    assert source.read_bytes() == before
    assert not list(tmp_path.rglob("*.partial"))


def test_the_parts_of_a_folder_become_one_file(tmp_path):
    """Saved in place, a model leaves no part of the old one for others to read."""
    settings = families.settings_of("llama")
    folder = families.write_folder(tmp_path / "model", settings, families.random_weights(settings), files=3)
    (folder / "notes.txt").write_text("not of the model")
    file = huggingface.open_folder(folder)
    model = llama.load(file)
    assert_same_bits(llama.load(written(folder, model, file)), model)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["config.json", "model.safetensors", "notes.txt"]


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    """Its template would be taken for the model's, and its weights would be lost."""
    settings = families.settings_of("llama")
    file = huggingface.open_folder(
        families.write_folder(tmp_path / "source", settings, families.random_weights(settings))
    )
    other = families.write_folder(tmp_path / "other", settings, families.random_weights(settings, seed=1))
    before = {path: path.read_bytes() for path in other.iterdir()}
    message = r"new or empty, or that of the model; got .*/other with config\.json in it\. Pass another folder\."
    with pytest.raises(FileExistsError, match=message):
        llama_files.save(other, llama.load(file), file)
    assert {path: path.read_bytes() for path in other.iterdir()} == before


def test_a_folder_that_is_not_whole_has_no_config(tmp_path, monkeypatch):
    """So it is not read as a model that lacks a tokenizer or a template."""
    settings = families.settings_of("llama")
    folder = families.write_folder(tmp_path / "source", settings, families.random_weights(settings))
    (folder / "tokenizer.json").write_text("{}")
    file = huggingface.open_folder(folder)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    with pytest.raises(OSError, match="No space left"):
        llama_files.save(tmp_path / "model", llama.load(file), file)
    assert not (tmp_path / "model/config.json").exists()


def test_an_adapter_on_a_full_disk_is_an_error_of_the_system(tmp_path, full_disk):
    write_tiny(tmp_path / "model.gguf")
    adapters = random_adapters(gguf.open_model(tmp_path / "model.gguf").config)
    with full_disk(), pytest.raises(OSError, match="File too large"):
        adapter_files.save(tmp_path / "adapter", adapters, alpha=1.0)
    assert not list((tmp_path / "adapter").iterdir())


def test_models_that_do_not_fit(file, model, tmp_path):
    short = dataclasses.replace(model, config=dataclasses.replace(model.config, num_layers=2), blocks=model.blocks[:2])
    with pytest.raises(
        ValueError, match="expected the file that the model was loaded from; got one with another config"
    ):
        llama_files.save(tmp_path / "short.gguf", short, file)
    settings = families.settings_of("qwen3")
    folder = families.write_folder(tmp_path / "folder", settings, families.random_weights(settings))
    qwen3 = llama.load(huggingface.open_folder(folder))
    norm = qwen3.blocks[1].head_norm
    assert norm is not None
    wrong = eqx.tree_at(lambda model: model.blocks[1].head_norm.weight, qwen3, norm.weight.at[1, 0].add(1))
    with pytest.raises(ValueError, match="expected one norm for all heads of queries, and of keys; got several"):
        llama_files.save(tmp_path / "wrong", wrong, huggingface.open_folder(folder))


def test_the_program_on_a_folder(tmp_path, capsys):
    write_folder(tmp_path / "source")
    file, _ = open_files(tmp_path / "source")
    adapters = random_adapters(file.config)
    adapter_files.save(tmp_path / "adapter", adapters, alpha=1.0)
    options = ["--weights", str(tmp_path / "source"), "--output", str(tmp_path / "merged"), "--encoding", "BF16"]
    assert merge.main([str(tmp_path / "adapter"), *options]) == 0
    assert json.loads(capsys.readouterr().out) == {"model": str(tmp_path / "merged"), "encoding": "BF16"}
    again, tokenizer = open_files(tmp_path / "merged")
    model, tokens = llama.load(file), jnp.asarray(TOKENS, jnp.int32)
    expected, got = logits(lora.attach(model, adapters), tokens), logits(llama.load(again), tokens)
    assert np.abs(got - expected).max() < 0.05 * np.abs(logits(model, tokens) - expected).max()
    assert tokenizer.decode(tokenizer.encode("the other")) == "the other"
    assert tokenizer.chat([{"role": "user", "content": "the"}]).startswith("<|im_start|>user")
