"""Weights in and out: safetensors and GGUF files, by a table of names."""

import json
import re

import equinox as eqx
import gguf as gguf_package
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import eqxcallback as eqxc
from models import bert, gguf, gguf_format
from models._errors import ModelFileError
from models._names import Table
from models.checkpoints import CheckpointError, load, save_gguf, save_safetensors
from models.embedder import default_folder


CONFIG = bert.Config(
    num_layers=2,
    embedding_size=12,
    hidden_size=20,
    num_heads=3,
    vocab_size=30,
    num_positions=16,
    num_kinds=2,
    layer_norm_eps=1e-12,
)
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def new(dtype=jnp.float32, seed=0):
    return bert.Bert(CONFIG, dtype, key=jax.random.key(seed))


def assert_same_bits(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def tensors_of(path):
    with safe_open(path, "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 it is not iterable


@pytest.mark.parametrize("dtype", DTYPES)
def test_safetensors_there_and_back(dtype, tmp_path):
    model = new(dtype)
    odd = jnp.array([-0.0, jnp.nan, -jnp.inf, 1e-7, *range(8)], dtype)
    model = eqx.tree_at(lambda model: model.blocks[1].down.bias, model, odd)
    save_safetensors(tmp_path / "model.safetensors", model, bert.NAMES)
    assert_same_bits(load(tmp_path / "model.safetensors", new(dtype, seed=1), bert.NAMES), model)
    like = eqx.filter_eval_shape(bert.Bert, CONFIG, dtype, key=jax.random.key(0))
    assert_same_bits(load(tmp_path, like, bert.NAMES), model)  # the folder
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_the_published_file_there_and_back(tmp_path):
    published = default_folder() / "model.safetensors"
    config = bert.config_of(json.loads((default_folder() / "config.json").read_text()))
    like = eqx.filter_eval_shape(bert.Bert, config, jnp.float32, key=jax.random.key(0))
    save_safetensors(tmp_path / "copy", load(published, like, bert.NAMES, unused=bert.UNUSED), bert.NAMES)
    theirs, ours = tensors_of(published), tensors_of(tmp_path / "copy")
    unused = {"embeddings.position_ids", "pooler.dense.bias", "pooler.dense.weight"}
    assert ours.keys() == theirs.keys() - unused
    for name, tensor in ours.items():
        assert (tensor.dtype, tensor.shape) == (theirs[name].dtype, theirs[name].shape)
        assert tensor.tobytes() == theirs[name].tobytes()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_gguf_there_and_back(dtype, tmp_path):
    model, path = new(dtype), tmp_path / "model.gguf"
    save_gguf(path, model, bert.GGUF_NAMES, architecture="bert", block_count=2)
    assert_same_bits(load(path, new(dtype, seed=1), bert.GGUF_NAMES), model)
    reader = gguf_package.GGUFReader(path)  # somebody else's
    field = reader.get_field("bert.block_count")
    assert field is not None
    assert field.contents() == 2
    weight = next(tensor for tensor in reader.tensors if tensor.name == "blk.1.ffn_up.weight")
    np.testing.assert_array_equal(weight.data, model.blocks[1].up.weight)


def test_gguf_names_are_those_of_llama_cpp():
    theirs = gguf_package.get_tensor_name_map(gguf_package.MODEL_ARCH.BERT, 2)
    ours, safetensors = Table(bert.GGUF_NAMES), Table(bert.NAMES)
    leaves = jax.tree_util.tree_leaves_with_path(new())
    assert len(leaves) == 5 + 2 * 16
    for keys, _ in leaves:
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        name = safetensors.name(path)
        assert name is not None
        assert ours.name(path) == theirs.get_name(name, try_suffixes=(".weight", ".bias"))


def test_quantised_tensors_are_blocks():
    """A GGUF file of a language model has them, and a layer of their encoding takes them."""
    path, name = gguf.default_path(), "blk.3.attn_k.weight"
    tensor = gguf_format.open_tensors(path)[name]
    assert tensor.encoding == "Q4_1"
    like = eqxc.nn.QuantizedLinear(jnp.zeros(tensor.data.shape, jnp.uint8), "Q4_1")
    layer = load(path, like, {name: "blocks"}, unused=["*.weight", "blk.*.*.weight"])
    x = jax.random.normal(jax.random.key(0), (tensor.shape[1],))
    weight = gguf_package.dequantize(tensor.data, gguf_package.GGMLQuantizationType.Q4_1)
    np.testing.assert_allclose(layer(x), weight @ np.asarray(x), rtol=1e-4, atol=1e-4)


def test_the_report_has_all_that_does_not_match(tmp_path):
    save_safetensors(tmp_path / "good", new(), bert.NAMES)
    tensors = tensors_of(tmp_path / "good")
    del tensors["embeddings.LayerNorm.bias"]
    query = "encoder.layer.1.attention.self.query"
    tensors[f"{query}.weight"] = tensors[f"{query}.weight"][:, :-1].copy()
    tensors[f"{query}.bias"] = tensors[f"{query}.bias"].astype(np.float16)
    tensors["embeddings.position_ids"] = np.arange(16)[None]
    extra = [f"encoder.layer.2.output.dense.{i}" for i in range(8)]
    save_file(tensors | {name: np.zeros(3, np.float32) for name in extra}, tmp_path / "bad")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "bad", new(), bert.NAMES, unused=bert.UNUSED)
    report = caught.value.report
    assert report.missing == ("embeddings.LayerNorm.bias",)
    assert sorted(report.unexpected) == extra
    assert report.shapes == (f"{query}.weight (expected (12, 12), got (12, 11))",)
    assert report.dtypes == (f"{query}.bias (expected float32, got float16)",)
    expected = (
        r".*bad: expected the tensors of Bert; got 1 missing: embeddings\.LayerNorm\.bias; 8 unexpected: .*, and 3 more; "
        r"1 of another shape: .*; 1 of another dtype: .*\. Use a file of this model, of this size and dtype\."
    )
    assert re.fullmatch(expected, str(caught.value))
    save_file(tensors_of(tmp_path / "good") | {"embeddings.position_ids": np.arange(3)}, tmp_path / "more")
    with pytest.raises(CheckpointError, match=r"1 unexpected: embeddings\.position_ids"):
        load(tmp_path / "more", new(), bert.NAMES)


def test_tables_that_do_not_fit(tmp_path):
    without_norm = {name: path for name, path in bert.NAMES.items() if path != "norm.*"}
    for names in (without_norm, without_norm | {"norm": "norm.weight", "bias": "norm.weight"}):
        with pytest.raises(ValueError, match=r"expected one tensor's name for each array of Bert.*Extend the table"):
            save_safetensors(tmp_path / "model", new(), names)
    with pytest.raises(ValueError, match="expected one tensor's name for each array"):
        # Two arrays of one name.
        save_safetensors(tmp_path / "model", new(), {"a.*": "tokens.*", "a.weight": "positions.weight", **bert.NAMES})
    with pytest.raises(ValueError, match=r"expected as many \* on both sides; got 'a\.\*' and 'b'"):
        Table({"a.*": "b"})
    assert not list(tmp_path.iterdir())
    table = Table({"a.*.b.*": "x[*].*", "c+": "d"})
    assert (table.path("a.10.b.w"), table.name("x[10].w"), table.path("c+")) == ("x[10].w", "a.10.b.w", "d")
    assert (table.path("a.1.2.b.w"), table.path("cc"), table.name("e")) == (None, None, None)


def test_shards(tmp_path):
    model = new()
    save_safetensors(tmp_path / "whole", model, bert.NAMES)
    tensors = sorted(tensors_of(tmp_path / "whole").items())
    files = {"a.safetensors": dict(tensors[:9]), "b.safetensors": dict(tensors[9:])}
    for name, part in files.items():
        save_file(part, tmp_path / name)
    assert_same_bits(load(tmp_path, new(seed=1), bert.NAMES), model)
    save_file(files["a.safetensors"], tmp_path / "old.safetensors")
    with pytest.raises(ModelFileError, match=r"old.safetensors: expected each tensor in one file; got '.*' again"):
        load(tmp_path, new(), bert.NAMES)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, part in files.items() for name in part}}))
    assert_same_bits(load(tmp_path, new(seed=1), bert.NAMES), model)
    for text in ("{", "[]", '{"weight_map": 3}'):
        index.write_text(text)
        with pytest.raises(ModelFileError, match=r"index\.json: expected an index of files; got .*Get it again"):
            load(tmp_path, new(), bert.NAMES)


def test_files_that_cannot_be_read(tmp_path):
    save_safetensors(tmp_path / "model", new(), bert.NAMES)
    data = (tmp_path / "model").read_bytes()
    (tmp_path / "cut").write_bytes(data[:-10])
    (tmp_path / "text").write_text("hello")
    save_file({"x": np.zeros(4, jnp.float8_e4m3fn)}, tmp_path / "float8")
    (tmp_path / "empty").mkdir()
    for name, message in {
        "cut": "expected a safetensors file that is whole; got: .*Get it again",
        "text": "expected a safetensors file that is whole",
        "none": "expected a file that can be read; got No such file",
        "empty": "expected a folder with safetensors files; got none in it",
        "float8": "expected tensor 'x' to be of one of BOOL, .*; got F8_E4M3, which is not supported",
    }.items():
        with pytest.raises(ModelFileError, match=f"{name}: {message}"):
            load(tmp_path / name, new(), bert.NAMES)
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(ModelFileError, match="truncated or corrupt"):
        load(tmp_path / "cut.gguf", new(), bert.GGUF_NAMES)


def test_a_file_stays_if_the_new_one_fails(tmp_path):
    path = tmp_path / "model.gguf"
    save_gguf(path, new(), bert.GGUF_NAMES, architecture="bert")
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"expected arrays of float32 or float16.* of bfloat16.*Use save_safetensors"):
        save_gguf(path, new(jnp.bfloat16), bert.GGUF_NAMES, architecture="bert")
    with pytest.raises(ValueError, match="Unknown type"):
        save_gguf(path, new(), bert.GGUF_NAMES, architecture="bert", other=object())
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["model.gguf"]
